"""The block's decoder layers, copied from the trunk as the family's record says."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from forerun.errors import UsageError
from forerun.families import FamilyRecord, LayerSource


class PreNormLayer(nn.Module):
    """The usual decoder layer, put together from its parts: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.input_layernorm = parts["input_layernorm"]
        self.self_attn = parts["self_attn"]
        self.post_attention_layernorm = parts["post_attention_layernorm"]
        self.mlp = parts["mlp"]

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[B, S, d] -> [B, S, d]; the keyword arguments are the attention's."""
        out = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + (out[0] if isinstance(out, tuple) else out)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LayerChain(nn.ModuleList):
    """Several decoder layers in a row, all called alike."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[B, S, d] -> [B, S, d]."""
        for layer in self:
            out = layer(hidden_states, **kwargs)
            hidden_states = out[0] if isinstance(out, tuple) else out
        return hidden_states


def make_decoder(layers: nn.ModuleList, config: PreTrainedConfig, family: FamilyRecord, k: int) -> nn.Module:
    """A copy of what the record names, for depth k + 1.

    Its key-value cache index is k, as the block keeps a cache of its own. It shares the trunk's configuration object,
    so that a later `set_attn_implementation` reaches it.

    Raises:
        UsageError: no layer of the trunk is of that kind.
    """
    made = [_copied(_find(layers, source, family), source, config, k) for source in family.layers]
    return made[0] if len(made) == 1 else LayerChain(made)


def _find(layers: nn.ModuleList, source: LayerSource, family: FamilyRecord) -> nn.Module:
    for layer in reversed(layers):
        if source.fits(partial(_has, layer)):
            return layer
    wanted = " and ".join([f"with {path}" for path in source.has] + [f"without {path}" for path in source.lacks])
    raise UsageError(
        f"the MTP block of family {family.name} is made from a layer {wanted}, and the trunk has none: "
        "give a trunk of the family's usual shape"
    )


def _has(layer: nn.Module, path: str) -> bool:
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is not None


def _copied(layer: nn.Module, source: LayerSource, config: PreTrainedConfig, k: int) -> nn.Module:
    if source.parts:
        layer = PreNormLayer({name: layer.get_submodule(path) for name, path in source.parts})
    made = copy.deepcopy(layer, {id(config): config})
    for module in made.modules():
        if "layer_idx" in module.__dict__:
            module.__dict__["layer_idx"] = k
    return made
