"""transformers' own layers over the engine's cache: an attention function that knows rows of unequal length.

Layers reach their attention through transformers' `AttentionInterface`, by the name in their configuration. The one
registered here hands keys and values to the step that is running. No mask function has that name, so transformers
builds no masks; which positions a token sees is the step's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from forerun.errors import UsageError
from forerun.rollout.native.cache import Step

ROWS_ATTENTION = "forerun_rows"
# What attention functions are told besides, and what changes nothing here. Anything else might.
_IGNORED = {
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
# A context variable rather than a keyword argument: not every model hands unknown arguments on to its attention.
_step: ContextVar[Step] = ContextVar("step")


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Every copied layer that is called inside works on this step."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_step() -> Step:
    """The step of the innermost `running`."""
    return _step.get()


def _attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [R, heads, T, D], key and value [R, kv_heads, T, D] of the new positions -> ([R, T, heads, D], None)."""
    unknown = [name for name, given in others.items() if given is not None and name not in _IGNORED]
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if is_causal is False:
        unknown.append("no causal mask")
    if unknown:
        raise UsageError(f"the native engine has no attention with {', '.join(unknown)}: use another rollout backend")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = current_step().attend(module, q, k, v, scale, sliding_window)
    return out.view(*q.shape[:3], v.shape[-1]), None


AttentionInterface.register(ROWS_ATTENTION, _attend_rows)


class RowsDecoder(nn.Module):
    """A copied decoder layer outside its trunk, as an MTP block has it.

    Args:
        decoder: the layer.
        rotary: the trunk's rotary embedding; None where it has none.
    """

    def __init__(self, decoder: nn.Module, rotary: nn.Module | None) -> None:
        super().__init__()
        self.decoder = decoder
        self.rotary = rotary

    def forward(self, x: Tensor, *, step: Step) -> Tensor:
        """x [R, T, d] -> [R, T, d]."""
        inputs: dict[str, Any] = {"attention_mask": None, "position_ids": step.positions, "use_cache": False}
        if self.rotary is not None:
            inputs["position_embeddings"] = self.rotary(x, step.positions)
        with running(step):
            out = self.decoder(x, **inputs)
        return out[0] if isinstance(out, tuple) else out
