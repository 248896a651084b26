"""Any split of a batch over micro-batches and ranks has the gradient, and the statistics, of the whole batch.

Both sides are float64 and compared parameter by parameter. The whole batch is one micro-batch that divides by what a
loop over its documents counts; the parts get their counts as users do: `depth_counts` of every micro-batch, added up,
then `reduce_counts` over the ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun import MTPConfig, attach
from forerun.algorithms.aggregation import LossAggMode, LossCounts, aggregate_loss, count_targets
from forerun.algorithms.sequences import sequence_lengths
from forerun.data.batch import Batch
from forerun.data.packing import Document, pack
from forerun.engines.accumulation import predicted_mask
from forerun.models.carrier import MTPCarrier
from forerun.models.training import mtp_forward
from forerun.models.trunk import base_model
from forerun.mtp import MTPStats, depth_counts, graft, reduce_counts
from forerun.mtp.stats import FIELDS
from tests.families.tiny import tiny_trunk
from tests.float64 import with_float64_norms
from tests.mtp.ranks import Ranks

VOCAB = 13
SCALE = 0.3  # mtp_loss_scaling_factor


@dataclass(frozen=True)
class Setting:
    """What is trained: model, objective, main loss. `main_subset`: the main loss takes some of the targets only."""

    depths: int = 1
    trunk: str = "dense"
    mask_rule: str = "target"
    loss: str = "ce"
    detach_encoder: bool = False
    main: LossAggMode = "token-mean"
    main_subset: bool = False


@dataclass(frozen=True)
class Split:
    """Rank -> its micro-batches -> their documents, by index. A micro-batch's rows hold up to `row_length` tokens."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    row_length: int = 12

    @property
    def world_size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Example:
    """A document is a pair of strings as long as it is: which tokens are targets, which of them the main loss takes."""

    documents: tuple[tuple[str, str], ...]
    split: Split
    setting: Setting = field(default_factory=Setting)


# ---- the step, as a rank does it


@functools.cache
def model_for(trunk: str, depths: int) -> MTPCarrier:
    changes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "num_key_value_heads": 1}
    if trunk == "dense":
        model = tiny_trunk("attached", **changes, tie_word_embeddings=True)
    else:  # two of four experts for each token
        model = tiny_trunk("attached_moe", **changes, mlp_only_layers=[], experts_implementation="eager")
    mtp = MTPConfig(enable=True, enable_train=True, num_layers=depths, mtp_loss_scaling_factor=SCALE, chunk_size=3)
    with_float64_norms(model)
    return attach(model.double(), mtp, init="plain", seed=1).double().train()


def configured(setting: Setting) -> MTPCarrier:
    model = model_for(setting.trunk, setting.depths)
    model.mtp_config = replace(
        model.mtp_config, mask_rule=setting.mask_rule, loss=setting.loss, detach_encoder=setting.detach_encoder
    )
    return model


def batch_of(example: Example, chosen: Sequence[int], row_length: int) -> Batch:
    documents = []
    for index in chosen:
        targets, main = example.documents[index]
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCAB, (len(targets),), generator=draw).tolist()
        in_main = [int(c == "1" or not example.setting.main_subset) for c in main]
        documents.append(Document(ids, [c == "1" for c in targets], {"main": in_main}))
    longest = max(len(document) for document in documents)
    (batch,) = pack(documents, max(row_length, longest), micro_batch_size=len(documents))
    return batch


def main_mask(batch: Batch) -> Tensor:
    return predicted_mask(batch) & batch.extras["main"].bool()


def hidden_states(model: MTPCarrier, batch: Batch) -> Tensor:
    trunk = base_model(model)
    return trunk(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state


def mtp_output(model: MTPCarrier, hidden: Tensor, batch: Batch, counts: Sequence[float] | None) -> Any:
    return mtp_forward(
        model,
        hidden,
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
        loss_mask=batch.loss_mask,
        counts=counts,
        compare_with_trunk=True,
    )


def token_losses(model: MTPCarrier, hidden: Tensor, batch: Batch) -> Tensor:
    """-log p of every token but a row's first, [B, S] at the token's own place."""
    log_p = model.get_output_embeddings()(hidden)[:, :-1].log_softmax(-1)
    losses = -log_p.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(losses, (1, 0))


def flat_gradient(model: MTPCarrier) -> Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def parts_of(setting: Setting) -> list[str]:
    return ["together", "main", *(f"depth {k}" for k in range(1, setting.depths + 1))]


def only(counts: Sequence[float], part: str) -> list[float]:
    """The counts with which a single depth is left in the loss: the others are divided by infinity."""
    return [n if part in ("together", f"depth {k}") else math.inf for k, n in enumerate(counts, start=1)]


def rank_step(group: dist.ProcessGroup, argument: tuple[Example, int]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The gradient of every part of the loss after the ranks' all-reduce, and the reduced sums of the statistics."""
    example, rank = argument
    setting, split = example.setting, example.split
    model = configured(setting)
    batches = [batch_of(example, chosen, split.row_length) for chosen in split.ranks[rank]]

    own = [0] * setting.depths
    main_counts = LossCounts()
    for batch in batches:
        counts = depth_counts(batch.document_ids, batch.loss_mask, setting.depths, setting.mask_rule)  # type: ignore[arg-type]
        own = [a + b for a, b in zip(own, counts, strict=True)]
        main_counts += count_targets(main_mask(batch), batch.document_ids)
    global_counts = reduce_counts(own, group)
    main_counts = LossCounts(*reduce_counts([main_counts.tokens, main_counts.sequences], group))

    found = {}
    stats = MTPStats.zeros(setting.depths)
    for part in parts_of(setting):
        model.zero_grad(set_to_none=True)
        for batch in batches:
            hidden = hidden_states(model, batch)
            loss = hidden.new_zeros(())
            if part != "main":
                output = mtp_output(model, hidden, batch, only(global_counts, part))
                loss = output.loss
            if part == "together":
                hidden = graft(hidden, loss)
                stats = stats.merge(output.stats)
            if part in ("together", "main"):
                mask = main_mask(batch)
                lengths = sequence_lengths(mask, batch.document_ids)
                losses = token_losses(model, hidden, batch)
                loss = aggregate_loss(losses, mask, setting.main, main_counts, lengths)
            loss.backward()
        gradient = flat_gradient(model)
        dist.all_reduce(gradient, group=group)
        found[part] = gradient.numpy()
    return found, stats.reduce(group).sums.numpy()


# ---- the whole batch


def counted_by_hand(example: Example) -> list[int]:
    counts = []
    for depth in range(1, example.setting.depths + 1):
        n = 0
        for targets, _ in example.documents:
            for i in range(len(targets) - depth - 1):
                first = i + 1 if example.setting.mask_rule == "span" else i + depth + 1
                n += "0" not in targets[first : i + depth + 2]
        counts.append(n)
    return counts


def main_by_hand(example: Example, losses: Tensor, batch: Batch) -> Tensor:
    """The main loss, document by document."""
    sums, lengths = [], []
    for index in range(len(example.documents)):
        places = (batch.document_ids == index).nonzero()[1:]  # its first token has no predecessor
        chosen = [(r, s) for r, s in places.tolist() if batch.loss_mask[r, s] and batch.extras["main"][r, s]]
        if chosen:
            sums.append(sum(losses[r, s] for r, s in chosen))
            lengths.append(len(chosen))
    if not sums:
        return losses.sum() * 0
    if example.setting.main == "token-mean":
        return sum(sums) / sum(lengths)  # type: ignore[return-value]
    return sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(sums)  # type: ignore[return-value]


def whole_step(example: Example) -> tuple[dict[str, Tensor], Tensor]:
    """As `rank_step`, in this process and one micro-batch; the losses are added, and the main one is made by hand.

    All depths together divide by the call's own counts, a depth alone by what was counted by hand: no count is handed
    down as the ranks do it.
    """
    model = configured(example.setting)
    everything = range(len(example.documents))
    batch = batch_of(example, everything, row_length=sum(len(targets) for targets, _ in example.documents))
    counts = counted_by_hand(example)
    found, sums = {}, torch.empty(0)
    for part in parts_of(example.setting):
        model.zero_grad(set_to_none=True)
        hidden = hidden_states(model, batch)
        loss = hidden.new_zeros(())
        if part in ("together", "main"):
            loss = loss + main_by_hand(example, token_losses(model, hidden, batch), batch)
        if part != "main":
            output = mtp_output(model, hidden, batch, None if part == "together" else only([1] * len(counts), part))
            loss, sums = loss + output.loss, output.stats.sums
        loss.backward()
        divisor = max(counts[int(part.split()[1]) - 1], 1) if part.startswith("depth") else 1
        found[part] = flat_gradient(model) / divisor
    assert sums[:, FIELDS.index("count")].tolist() == counts
    return found, sums


# ---- random batches and splits

bits = st.characters(codec="ascii", include_characters="01", categories=())


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, str]:
    length = draw(st.integers(1, 8))
    return draw(st.text(bits, min_size=length, max_size=length)), draw(st.text(bits, min_size=length, max_size=length))


@st.composite
def examples(draw: st.DrawFn, trunk: str) -> Example:
    made = tuple(draw(st.lists(documents(), min_size=1, max_size=7)))
    world_size = draw(st.sampled_from([2, 4]))
    micro_batches = 2
    cells = draw(st.lists(st.integers(0, world_size * micro_batches - 1), min_size=len(made), max_size=len(made)))
    ranks = []
    for rank in range(world_size):
        of_rank = [
            tuple(index for index, cell in enumerate(cells) if cell == rank * micro_batches + m)
            for m in range(micro_batches)
        ]
        ranks.append(tuple(chosen for chosen in of_rank if chosen))
    setting = Setting(
        depths=draw(st.sampled_from([1, 2])),
        trunk=trunk,
        mask_rule=draw(st.sampled_from(["target", "span"])),
        loss=draw(st.sampled_from(["ce", "soft_ce", "tv"])),
        detach_encoder=draw(st.booleans()),
        main=draw(st.sampled_from(["token-mean", "seq-mean-token-mean"])),
        main_subset=draw(st.booleans()),
    )
    return Example(made, Split(tuple(ranks), draw(st.integers(1, 16))), setting)


# Uneven in every way: a rank with no row, one with rows but no target at all, one whose documents are too short for
# depth 2, micro-batches of different sizes.
DOCUMENTS = (
    ("01111011", "01010011"),
    ("111", "101"),
    ("1", "1"),
    ("00000", "11111"),
    ("0111111", "1111000"),
    ("11", "11"),
)
UNEVEN = Split(((), ((3,),), ((1, 2), (5,)), ((0, 4),)), row_length=9)
TWO_RANKS = Split((((5,), (0, 1, 3)), ((2, 4),)), row_length=8)


def check(example: Example, ranks: Ranks) -> None:
    expected, sums = whole_step(example)
    answers = ranks.run(rank_step, [(example, rank) for rank in range(example.split.world_size)])
    model = configured(example.setting)
    names = [name for name, _ in model.named_parameters()]
    sizes = [parameter.numel() for parameter in model.parameters()]
    # The router's softmax is float32 in transformers.
    tolerance = {"rtol": 1e-10, "atol": 1e-13} if example.setting.trunk == "dense" else {"rtol": 1e-5, "atol": 1e-7}
    for found, reduced in answers:
        for part, gradient in expected.items():
            for name, ours, theirs in zip(
                names, torch.from_numpy(found[part]).split(sizes), gradient.split(sizes), strict=True
            ):
                torch.testing.assert_close(ours, theirs, **tolerance, msg=lambda m, p=part, n=name: f"{p}, {n}: {m}")
        torch.testing.assert_close(torch.from_numpy(reduced), sums, **tolerance)
        ours_figures, theirs_figures = MTPStats(torch.from_numpy(reduced)).compute(), MTPStats(sums).compute()
        assert {k for k, v in ours_figures.items() if v is None} == {k for k, v in theirs_figures.items() if v is None}


PROPERTY = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@PROPERTY
@given(examples("dense"))
@example(Example(DOCUMENTS, UNEVEN, Setting(depths=2)))
@example(Example(DOCUMENTS, UNEVEN, Setting(depths=2, mask_rule="span", main="seq-mean-token-mean")))
@example(Example(DOCUMENTS, TWO_RANKS, Setting(depths=2, main="seq-mean-token-mean", main_subset=True)))
@example(Example(DOCUMENTS, TWO_RANKS, Setting(depths=1, detach_encoder=True)))
@example(Example((("00", "11"), ("0", "0")), Split((((0,),), ((1,),))), Setting(depths=2)))  # no target anywhere
def test_any_split_has_the_gradient_of_the_whole(ranks: Ranks, example: Example) -> None:
    check(example, ranks)


@settings(PROPERTY, max_examples=12)
@given(examples("routed"))
@example(Example(DOCUMENTS, UNEVEN, Setting(depths=2, trunk="routed", main_subset=True)))
@example(Example(DOCUMENTS, TWO_RANKS, Setting(depths=2, trunk="routed", main="seq-mean-token-mean")))
def test_so_with_routed_experts_in_trunk_and_block(ranks: Ranks, example: Example) -> None:
    """Mixture-of-experts layers: each token's gradient reaches the experts that it was routed to, in any split."""
    trained = [name for name, _ in model_for("routed", example.setting.depths).named_parameters() if "experts" in name]
    assert any(name.startswith("mtp.") for name in trained) and any(name.startswith("model.") for name in trained)
    check(example, ranks)
