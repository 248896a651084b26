"""What a trainer hands to forward besides plain labels: shifted labels, accumulation steps, several ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forerun import MTPConfig, attach
from forerun.models.carrier import MTPCarrier
from forerun.trainers.hf_callback import MTPCallback
from tests.models.tiny import gradients, tiny_model, token_rows
from tests.mtp.ranks import Ranks


def carrier() -> MTPCarrier:
    mtp = MTPConfig(enable=True, enable_train=True, num_layers=2, detach_encoder=True)
    return attach(tiny_model(), mtp, init="plain").double().train()


def head_gradients(model: MTPCarrier) -> dict[str, Tensor]:
    found = {name: grad for name, grad in gradients(model).items() if name.startswith("mtp.") and grad is not None}
    assert found and all(grad.abs().sum() > 0 for grad in found.values())
    return found


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-6, atol=1e-9, msg=name)


def test_shifted_labels_supervise_the_same_tokens() -> None:
    """Sequence-parallel trainers pass `shift_labels`, labels already moved by one; they must not be moved twice."""
    ids = token_rows(2, 12)
    labels = ids.masked_fill((torch.arange(12) < 4) | (torch.arange(12) == 9), -100)
    plain, shifted = carrier(), carrier()
    plain(input_ids=ids, labels=labels).loss.backward()
    moved = F.pad(labels[:, 1:], (0, 1), value=-100)
    shifted(input_ids=ids, shift_labels=moved).logits.sum().backward()
    assert_same(head_gradients(shifted), head_gradients(plain))


def test_accumulation_steps_divide_where_no_count_is_handed_down() -> None:
    ids = token_rows(2, 12)
    whole, split = carrier(), carrier()
    whole(input_ids=ids, labels=ids).loss.backward()
    split.mtp_accumulation_steps = 2
    for row in ids:
        split(input_ids=row[None], labels=row[None]).loss.backward()
    assert_same(head_gradients(split), head_gradients(whole))


LABELS = token_rows(2, 12)
LABELS[1, :7] = -100
ITEMS = (LABELS[:, 1:] != -100).sum(dim=1)


def forward(model: MTPCarrier, rank: int, averaged: bool) -> None:
    count = ITEMS.sum() if averaged else ITEMS[rank]
    row = slice(rank, rank + 1)
    model(input_ids=token_rows(2, 12)[row], labels=LABELS[row], num_items_in_batch=count).loss.backward()


def rank_trains(group: dist.ProcessGroup, averaged: bool) -> dict[str, Tensor]:
    """What the optimizer of this rank would step by."""
    settings = {"fp16": False, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "n_gpu": 0}
    args: Any = SimpleNamespace(world_size=group.size(), average_tokens_across_devices=averaged, **settings)
    model, callback = carrier(), MTPCallback(max_grad_norm=0)  # no clipping
    callback.on_train_begin(args, None, None, model=model)
    forward(model, group.rank(), averaged)
    callback.on_pre_optimizer_step(args, None, None)
    return head_gradients(model)


@pytest.mark.parametrize("averaged", [True, False])
def test_ranks_with_uneven_counts_give_the_gradient_of_the_whole(averaged: bool, tmp_path: Path) -> None:
    """With average_tokens_across_devices the Trainer counts over all ranks and multiplies its loss by their number,
    because their gradients are then averaged; without, each rank's count is its own."""
    reference: dict[str, Tensor] = {}
    for rank in range(2):
        model = carrier()
        forward(model, rank, averaged)
        for name, grad in head_gradients(model).items():
            # Averaged over ranks: a global count gives the sum of the ranks' shares, a count of their own the mean.
            reference[name] = reference.get(name, 0) + (grad if averaged else grad / 2)
    with Ranks(2, [2], tmp_path / "store") as ranks:
        for found in ranks.run(rank_trains, [averaged] * 2):
            assert_same(found, reference)


def test_a_packed_row_that_the_trunk_takes_for_one_document_is_told(recwarn: pytest.WarningsRecorder) -> None:
    model, ids = carrier(), token_rows(1, 10)
    packed = torch.arange(5).repeat(2)[None]
    model(input_ids=ids, labels=ids, position_ids=packed, use_cache=False)
    model(input_ids=ids, labels=ids, position_ids=torch.arange(10)[None])
    assert not [w for w in recwarn if "packed" in str(w.message)]
    with pytest.warns(UserWarning, match="pass use_cache=False"):
        model(input_ids=ids, labels=ids, position_ids=packed)
