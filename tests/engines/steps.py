"""What the engines' tests train on, and how what two engines show is compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.data.batch import Batch
from forerun.data.packing import Document
from forerun.trainers.batching import Rows, micro_batches
from forerun.trainers.sft import NextTokenLoss
from tests.families.tiny import VOCAB


def step_batches(step: int, count: int = 9, max_length: int = 24, rows: int = 1) -> list[Batch]:
    """Packed rows of `count` documents of 2 to 20 tokens: an odd number of micro-batches, unlike in length."""
    draw = torch.Generator().manual_seed(step)
    documents = []
    for _ in range(count):
        length = int(torch.randint(2, 21, (1,), generator=draw))
        ids = torch.randint(0, VOCAB, (length,), generator=draw).tolist()
        documents.append(Document(ids, [j >= length // 3 for j in range(length)]))
    batches = micro_batches(Rows(documents, max_length, packing=True), rows)
    return batches[: len(batches) - 1 + len(batches) % 2]


class MeanLoss(NextTokenLoss):
    """With a metric that is merged by maximum."""

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert log_probs.shape == batch.input_ids.shape
        return super().__call__(log_probs, batch)[0], {"least_max": -log_probs.detach().min()}


def assert_close(
    found: Any, expected: Any, where: str = "", *, tensors: tuple[float, float], numbers: tuple[float, float]
) -> None:
    """Nested results agree to (relative, absolute) tolerances; the absolute one of a tensor is times its largest."""
    tolerances: Any = {"tensors": tensors, "numbers": numbers}
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_close(found[name], expected[name], f"{where}/{name}", **tolerances)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_close(a, b, f"{where}[{i}]", **tolerances)
    elif isinstance(expected, Tensor):
        rtol, atol = tensors[0], tensors[1] * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=numbers[0], abs=numbers[1]), where
    else:
        assert found == expected, where
