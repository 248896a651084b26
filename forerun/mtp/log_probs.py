"""Log-probabilities and entropies for policy losses, from logits of a chunk of positions at a time.

A policy loss is made of them afterwards, so a chunk's logits are made again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from forerun.mtp.losses import WHOLE, Project, Vocabulary, at_least_float32, default_chunk_size


class _LogProbsAndEntropy(torch.autograd.Function):
    """Log-probabilities of one token a row, and the rows' entropies.

    With p = softmax(z / T) of the logits z:

        d log p_t / dz_j = (1[j = t] - p_j) / T
        d H / dz_j       = -p_j (log p_j + H) / T       no time and no memory where no loss is made of the entropy
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, vocabulary: Vocabulary
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        log_p = vocabulary.log_softmax(logits if temperature == 1.0 else logits / temperature)
        entropy = -vocabulary.sum(log_p.exp().mul_(log_p).sum(dim=-1))
        column, own = vocabulary.columns(tokens)
        log_probs = vocabulary.sum(log_p.gather(-1, column) * own).squeeze(-1)
        ctx.save_for_backward(log_p, column, own, entropy)
        ctx.temperature = temperature
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_log_prob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor, None, None, None]:
        log_p, column, own, entropy = ctx.saved_tensors
        by_log_prob = (torch.zeros_like(entropy) if by_log_prob is None else by_log_prob).unsqueeze(-1)
        grad = log_p.exp()
        if by_entropy is None:
            grad.mul_(by_log_prob)
        else:
            grad.mul_((log_p + entropy.unsqueeze(-1)).mul_(by_entropy.unsqueeze(-1)).add_(by_log_prob))
        grad.scatter_add_(-1, column, -by_log_prob * own)
        return grad.div_(-ctx.temperature), None, None, None


def chunked_log_probs(
    hidden_states: Tensor,
    targets: Tensor,
    project: Project,
    chunk_size: int | None,
    temperature: float = 1.0,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy of its distribution, one chunk of logits at a time.

    Logits are made again in backward, so none are kept.

    Args:
        hidden_states: [N, d].
        targets: long [N].
        project: hiddens [n, d] -> logits [n, V].
        temperature: divides the logits.
        vocabulary: as in `fused_loss`.

    Returns:
        (log_probs [N]; entropy [N] in nats), both differentiable, float32 (float64 for float64 hiddens).
    """

    def one(chunk: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return _LogProbsAndEntropy.apply(at_least_float32(project(chunk)), wanted, temperature, vocabulary)

    if hidden_states.shape[0] == 0:
        empty = at_least_float32(hidden_states).sum(dim=-1)
        return empty, empty
    differentiable = torch.is_grad_enabled()
    size = chunk_size or default_chunk_size(hidden_states.device.type)
    # Nothing in a chunk is random, and a GPU's generator would be read and set for each of them.
    parts = [
        checkpoint(one, h, t, use_reentrant=False, preserve_rng_state=False) if differentiable else one(h, t)
        for h, t in zip(hidden_states.split(size), targets.split(size), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)
