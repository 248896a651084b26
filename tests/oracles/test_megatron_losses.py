"""The MTP loss on given hiddens against Megatron's: values, gradients, the scale contract - and where the two differ.

Both divide by D and multiply by `mtp_loss_scaling_factor` (0.1 on both sides, nobody sets it here). They differ in the
count that a depth's sum is divided by: forerun's is that of the whole global batch, Megatron's that of whatever one
process holds in one micro-batch. A slow float64 reference, document by document, says which of them is the objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import forerun
from forerun.models.training import MTPOutput, mtp_forward
from forerun.mtp.shift import depth_counts, depth_targets, document_ids_from_cu_seqlens
from tests.families.tiny import tiny_trunk
from tests.oracles.exchange import ask
from tests.oracles.megatron_layout import rows_for_megatron

pytestmark = pytest.mark.oracle

SIZE, VOCAB, SCALE = 16, 40, 0.1


class GivenHiddens(nn.Module):
    """Stands where the MTP block is and answers with hiddens chosen by the test."""

    def __init__(self, hiddens: Tensor) -> None:
        super().__init__()
        self.hiddens = hiddens
        self.num_depths = len(hiddens)

    def forward(self, *_: Any, **__: Any) -> list[Tensor]:
        return list(self.hiddens)


@dataclass(frozen=True)
class Case:
    depths: int = 2
    rows: int = 2
    length: int = 16
    cu_seqlens: tuple[int, ...] = ()
    supervised: float = 0.7
    per_token: bool = False
    context_parallel: int = 1
    seed: int = 0

    def boundaries(self) -> tuple[int, ...]:
        return self.cu_seqlens or (0, self.length)

    def documents(self) -> Tensor:
        return document_ids_from_cu_seqlens(torch.tensor(self.boundaries()), self.length).expand(self.rows, -1)

    def tensors(self) -> dict[str, Tensor]:
        """Hiddens [1 + D, B, S, d] of the trunk and every depth, the LM head [V, d], tokens and mask [B, S]."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.rows, self.length)
        return {
            "hidden_states": torch.randn(1 + self.depths, *shape, SIZE, generator=generator),
            "head": torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(9)),
            "input_ids": torch.randint(1, VOCAB, shape, generator=generator),
            "loss_mask": torch.rand(shape, generator=generator) < self.supervised,
        }

    def shards(self) -> list[Tensor]:
        """Places that each context-parallel rank holds."""
        chunks, n = torch.arange(self.length).chunk(2 * self.context_parallel), self.context_parallel
        return [torch.cat([chunks[r], chunks[2 * n - 1 - r]]) if n > 1 else torch.arange(self.length) for r in range(n)]

    def for_megatron(self) -> dict[str, Tensor]:
        own = self.tensors()
        return rows_for_megatron(own["input_ids"], own["loss_mask"], list(pairwise(self.boundaries())))

    def main_count(self) -> int:
        """Targets of the ordinary next-token loss."""
        return int(self.for_megatron()["loss_mask"].sum())

    def counts(self) -> list[int]:
        return depth_counts(self.documents(), self.tensors()["loss_mask"], self.depths)


@dataclass
class Step:
    """Loss sum or mean per depth, and the gradients of scale / D times the depths' losses."""

    losses: Tensor  # [D]
    hidden_states: Tensor  # [D, B, S, d]
    head: Tensor  # [V, d], of the MTP loss alone


def ours(case: Case, counts: list[float] | None = None) -> Step:
    own = case.tensors()
    trunk = tiny_trunk("attached", vocab_size=VOCAB, hidden_size=SIZE)
    model = forerun.attach(trunk, forerun.MTPConfig(enable=True, num_layers=case.depths, chunk_size=5))
    model.lm_head.weight.data.copy_(own["head"])
    hiddens = own["hidden_states"][1:].requires_grad_()
    model.mtp = GivenHiddens(hiddens)
    output: MTPOutput = mtp_forward(
        model,
        own["hidden_states"][0],
        input_ids=own["input_ids"],
        position_ids=torch.arange(case.length).expand(case.rows, -1),
        document_ids=case.documents(),
        loss_mask=own["loss_mask"],
        counts=counts,
    )
    output.loss.backward()
    figures = output.stats.compute()
    losses = [figures[f"mtp/depth_{depth}/loss"] for depth in range(1, case.depths + 1)]
    assert hiddens.grad is not None and model.lm_head.weight.grad is not None
    return Step(torch.tensor(losses), hiddens.grad, model.lm_head.weight.grad)


def reference(cases: list[Case]) -> Step:
    """DESIGN: every document by itself, one position after the other, divided by the counts of all of them. Float64."""
    head = cases[0].tensors()["head"].double().requires_grad_()
    hiddens = [case.tensors()["hidden_states"][1:].double().requires_grad_() for case in cases]
    depths = cases[0].depths
    sums, counts = [head.new_zeros(()) for _ in range(depths)], [0] * depths
    for case, hidden in zip(cases, hiddens, strict=True):
        own = case.tensors()
        for row in range(case.rows):
            for start, end in pairwise(case.boundaries()):
                for depth in range(1, depths + 1):
                    for i in range(start, end - depth - 1):
                        target = i + depth + 1
                        if own["loss_mask"][row, target]:
                            log_p = (head @ hidden[depth - 1, row, i]).log_softmax(-1)
                            sums[depth - 1] = sums[depth - 1] - log_p[own["input_ids"][row, target]]
                            counts[depth - 1] += 1
    losses = torch.stack([total / count for total, count in zip(sums, counts, strict=True)])
    (SCALE / depths * losses.sum()).backward()
    assert head.grad is not None
    return Step(losses.detach(), torch.cat([h.grad for h in hiddens], dim=1), head.grad)


def main_gradient(case: Case) -> Tensor:
    """Of the LM head by the main loss, summed over its tokens. Megatron's answer holds both losses' gradient."""
    own, rows = case.tensors(), case.for_megatron()
    head = own["head"].double().requires_grad_()
    counted = rows["loss_mask"].bool()
    logits = own["hidden_states"][0].double()[counted] @ head.T
    nn.functional.cross_entropy(logits, rows["labels"][counted], reduction="sum").backward()
    assert head.grad is not None
    return head.grad


EQUAL = {
    **{f"D{depths}": Case(depths=depths, seed=depths) for depths in (1, 2, 3)},
    "packed": Case(rows=1, length=20, cu_seqlens=(0, 5, 6, 8, 20), seed=4),
    "few_targets": Case(supervised=0.1, rows=1, length=24, seed=7),
}
PER_TOKEN = Case(per_token=True, seed=5)
# Uneven on purpose: one micro-batch has most of the targets.
MICRO_BATCHES = [Case(supervised=0.9, seed=10), Case(supervised=0.2, seed=11)]
SHARDED = Case(supervised=0.5, context_parallel=2, seed=12)
CASES = {**EQUAL, "per_token": PER_TOKEN, "micro_0": MICRO_BATCHES[0], "micro_1": MICRO_BATCHES[1], "sharded": SHARDED}


@pytest.fixture(scope="module")
def answers(megatron_env: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    settings, given = {}, {}
    for name, case in CASES.items():
        settings[name] = {"per_token": case.per_token, "context_parallel": case.context_parallel}
        settings[name]["cu_seqlens"] = list(case.cu_seqlens)
        own, rows = case.tensors(), case.for_megatron()
        given[f"{name}/head"] = own["head"]
        for rank, places in enumerate(case.shards()):
            suffix = f"/{rank}" if case.context_parallel > 1 else ""
            given[f"{name}/hidden_states{suffix}"] = own["hidden_states"][:, :, places]
            given[f"{name}/labels{suffix}"] = rows["labels"][:, places]
            given[f"{name}/loss_mask{suffix}"] = rows["loss_mask"][:, places]
    return ask(megatron_env, "megatron/losses.py", tmp_path_factory.mktemp("losses"), settings, given)


def theirs(answers: dict[str, Tensor], name: str) -> Step:
    """Megatron's answer for one process, with the main loss taken out of the head's gradient."""
    case = CASES[name]
    main = main_gradient(case) / (1 if case.per_token else case.main_count())
    return Step(answers[f"{name}/losses"], answers[f"{name}/hidden_states"][1:], answers[f"{name}/head"] - main)


def assert_same(left: Step, right: Step) -> None:
    for field in ("losses", "hidden_states", "head"):
        a, b = getattr(left, field).double(), getattr(right, field).double()
        # The head's is a difference of float32 gradients, the larger of which is the main loss's.
        assert (a - b).norm() / b.norm() < 1e-5, f"{field}: relative difference {(a - b).norm() / b.norm():.1e}"


@pytest.mark.parametrize("name", EQUAL)
def test_losses_and_gradients(answers: dict[str, Tensor], name: str) -> None:
    own = ours(EQUAL[name])
    assert_same(own, theirs(answers, name))
    assert_same(own, reference([EQUAL[name]]))


def test_per_token_loss(answers: dict[str, Tensor]) -> None:
    """With calculate_per_token_loss Megatron divides every depth by the main loss's count, after the backward pass.

    forerun does so when that count is given for every depth, as it is for trainers that hand down num_items_in_batch.
    """
    main = PER_TOKEN.main_count()
    step = theirs(answers, "per_token")
    divided = Step(step.losses, step.hidden_states / main, step.head / main)
    assert_same(ours(PER_TOKEN, [main] * PER_TOKEN.depths), divided)
    assert main != PER_TOKEN.counts()[0]  # so this is not the mean per depth


def test_counts_per_micro_batch_are_where_we_differ(answers: dict[str, Tensor]) -> None:
    """Megatron averages the micro-batches' means; with the whole batch's counts forerun gives the batch's gradient."""
    counts = [float(sum(n)) for n in zip(*(case.counts() for case in MICRO_BATCHES), strict=True)]
    parts = [ours(case, counts) for case in MICRO_BATCHES]
    whole = reference(MICRO_BATCHES)
    hidden_states = torch.cat([part.hidden_states for part in parts], dim=1)
    assert_same(Step(whole.losses, hidden_states, parts[0].head + parts[1].head), whole)

    megatron = [theirs(answers, f"micro_{n}") for n in (0, 1)]
    found = torch.cat([step.hidden_states for step in megatron], dim=1) / 2  # its schedule divides by their number
    means = torch.cat([ours(case).hidden_states for case in MICRO_BATCHES], dim=1) / 2
    torch.testing.assert_close(found, means, rtol=1e-5, atol=1e-8)
    assert (found - whole.hidden_states).norm() / whole.hidden_states.norm() > 0.3


def test_counts_per_context_parallel_rank_are_where_we_differ(answers: dict[str, Tensor]) -> None:
    """Each rank divides by the targets of its own shard, and gradients are then averaged over the ranks."""
    whole = reference([SHARDED])
    assert_same(ours(SHARDED), whole)

    off = []
    for rank, places in enumerate(SHARDED.shards()):
        own = SHARDED.tensors()
        found = answers[f"sharded/hidden_states/{rank}"][1:] / 2
        for depth, count in enumerate(SHARDED.counts(), start=1):
            valid = depth_targets(own["input_ids"], SHARDED.documents(), own["loss_mask"], depth).valid[:, places]
            share = count / (2 * int(valid.sum()))  # 1 where the shard has its fair part of the targets
            expected = whole.hidden_states[depth - 1][:, places].float()
            torch.testing.assert_close(found[depth - 1], expected * share, rtol=1e-4, atol=1e-8)
            off.append(abs(share - 1))
    assert max(off) > 0.05
