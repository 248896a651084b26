"""The soft losses learn from the trunk's distribution and never teach it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from forerun.mtp.losses import LossSpec, fused_loss


@pytest.mark.parametrize("spec", [LossSpec("soft_ce"), LossSpec("tv"), LossSpec("soft_ce", top_k=3)], ids=str)
def test_the_teacher_gets_no_gradient(spec: LossSpec) -> None:
    """Neither its hidden nor, through the teacher's logits, the LM head that both share."""
    torch.manual_seed(0)
    hidden, teacher = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.zeros(5, dtype=torch.long)

    def loss_of(head: torch.Tensor, teacher_head: torch.Tensor) -> torch.Tensor:
        log_q = F.log_softmax(hidden @ head.T, dim=-1)
        p = F.softmax(teacher @ teacher_head.T, dim=-1)
        if spec.top_k is not None:
            p, kept = p.topk(spec.top_k, dim=-1)
            p, log_q = p / p.sum(-1, keepdim=True), log_q.gather(-1, kept)
        each = -(p * log_q) if spec.kind == "soft_ce" else -torch.minimum(p, log_q.exp())
        return each.sum()

    fused_loss(
        hidden,
        labels,
        lambda h: F.linear(h, weight),
        spec,
        chunk_size=2,
        teacher_hidden=teacher,
        projection_parameters=(weight,),
    ).loss.backward()
    assert teacher.grad is None
    (expected,) = torch.autograd.grad(loss_of(weight, weight.detach()), weight)
    torch.testing.assert_close(weight.grad, expected)
