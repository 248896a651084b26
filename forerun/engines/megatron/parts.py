"""Parts of megatron-core's layers that Forerun supplies or mends, where its own need Transformer Engine or are wrong.

Nothing of megatron-core is patched: these go through its layer specs, or change modules after they are built.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn


class ParallelRMSNorm:
    """torch's RMSNorm as a norm of megatron-core's specs, also where positions are divided over ranks.

    Megatron-core's `WrappedTorchNorm` refuses sequence parallelism; it sums the gradients of parameters with this mark.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm: Any = nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention with the norms and projections of its spec.

    Megatron-core 0.19 wants them to follow `config.qk_layernorm`, and a fused layer where queries have no latents.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class LatentDownProjection(ColumnParallelLinear):
    """The projection to the latents of keys and values and to the keys' rotary part, under sequence parallelism.

    Megatron-core gathers its output over tensor-parallel ranks, and then gives the rotary part, which all heads share,
    the gradient of a rank's own heads only. Given an output as an undivided projection has it, whole for a rank's share
    of the positions, its layer gathers the rotary part by a function that sums gradients on the way back.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(*args, **kwargs)
        whole = gather_from_tensor_model_parallel_region(out, group=self.tp_group)
        return scatter_to_sequence_parallel_region(whole, group=self.tp_group), bias


def mend_latent_attention(model: nn.Module) -> None:
    """Change the layers of a built chunk that hold a divided projection to latents, in place."""
    for module in model.modules():
        down: Any = getattr(module, "linear_kv_down_proj", None)
        if type(down) is ColumnParallelLinear and down.sequence_parallel:
            down.__class__ = LatentDownProjection


def read_before_norm(reader: nn.Module, norm: Any, *, isolated: bool) -> None:
    """Let `reader`, an RMS norm that is given what `norm` put out, see what went in, up to a factor per position.

    A norm does not see that factor (epsilons apart), so dividing by the weight is all there is to undo
    (`forerun.models.trunk.UndoNorm`).

    Args:
        isolated: no gradient to the weight; the hidden comes without one, too.
    """

    def undo(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        weight = norm.weight.detach() if isolated else norm.weight
        return (args[0] / weight, *args[1:])

    reader.register_forward_pre_hook(undo)
