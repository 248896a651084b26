"""The soft losses learn from the trunk's distribution and never teach it."""

from __future__ import annotations

import pytest
import torch

from forerun.mtp.losses import LossSpec, position_losses


@pytest.mark.parametrize("spec", [LossSpec("soft_ce"), LossSpec("tv"), LossSpec("soft_ce", top_k=3)], ids=str)
def test_the_teacher_gets_no_gradient(spec: LossSpec) -> None:
    torch.manual_seed(0)
    logits, teacher = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    position_losses(logits, torch.zeros(5, dtype=torch.long), teacher, spec).sum().backward()
    assert teacher.grad is None
    assert logits.grad is not None and logits.grad.abs().sum() > 0
