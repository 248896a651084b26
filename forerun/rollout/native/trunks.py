"""A model's trunk in the engine's copy: of the engine's own layers where these compute it, else of transformers'."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.errors import UsageError
from forerun.models.trunk import final_norm
from forerun.mtp.block import MTPLayer
from forerun.rollout.native.attention import RowsDecoder, running
from forerun.rollout.native.cache import Rotary, Step
from forerun.rollout.native.delta_net import GatedDeltaNet
from forerun.rollout.native.layers import FusedDecoderLayer, WeightCopies

# Rotary embeddings whose factors depend on more than the position cannot be used for rows of unequal length.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
_FUSED_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_FUSED_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_FUSED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}


def check_rows(trunk: Any) -> None:
    """Raise a `UsageError` for a trunk whose layers cannot work on rows of unequal length."""
    name, config = type(trunk).__name__, trunk.config
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"the native engine runs decoders alone, and {name} has an encoder: use another backend")
    types = set(getattr(config, "layer_types", None) or ())
    if "linear_attention" in types and not any(map(GatedDeltaNet.is_one, trunk.modules())):
        raise UsageError(
            f"the native engine rolls back recurrent layers of Qwen3-Next's kind only, and {name} has others: "
            "use another rollout backend"
        )
    if others := types - _LAYER_TYPES:
        raise UsageError(
            f"the native engine has no layers of type {', '.join(sorted(others))}, which {name} has: "
            "use another rollout backend"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    for kind in kinds:
        if kind.get("rope_type", "default") not in _ROPE_TYPES:
            raise UsageError(
                f"the native engine has no rotary embedding of type {kind['rope_type']!r}, which {name} has"
            )


class FusedTrunk(nn.Module):
    """A Llama-like trunk (RMS norms, rotary embedding, gated MLP, optional q and k norms) of `FusedDecoderLayer`s.

    Args:
        trunk: transformers'; see `fits`.
        copies: where the weights go.

    Attributes:
        norm: the final norm.
        delta_nets: the recurrent layers, none here.
    """

    def __init__(self, trunk: Any, copies: WeightCopies) -> None:
        super().__init__()
        self.delta_nets: list[GatedDeltaNet] = []
        self.layers = nn.ModuleList(FusedDecoderLayer(layer, i, copies) for i, layer in enumerate(trunk.layers))
        self.norm = copies.norm(trunk.norm)
        self.embedding = copies.copy(trunk.get_input_embeddings().weight)
        self._rotary = copy.deepcopy(trunk.rotary_emb).to(copies.device)

    @staticmethod
    def fits(trunk: Any, mtp_layers: list[MTPLayer]) -> bool:
        """Whether all layers have exactly the parts of a Llama-like one. What they do with them shows when they run."""
        if set(dict(trunk.named_children())) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            return False
        types = set(getattr(trunk.config, "layer_types", None) or ())
        if types - {"full_attention"} or (not types and getattr(trunk.config, "sliding_window", None) is not None):
            return False
        if type(trunk.embed_tokens) is not nn.Embedding or not hasattr(trunk.norm, "variance_epsilon"):
            return False
        return all(map(_is_fusible, [*trunk.layers, *(layer.decoder for layer in mtp_layers)]))

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., d]."""
        return F.embedding(tokens, self.embedding)

    def forward(self, tokens: Tensor, step: Step) -> Tensor:
        """tokens long [R, T] -> hiddens [R, T, d] that the LM head takes."""
        hidden_states = self.embed(tokens)
        for layer in self.layers:
            hidden_states = layer(hidden_states, step=step)
        return self.norm(hidden_states)

    def make_rotary(self, capacity: int) -> Rotary:
        """Factors for positions below `capacity`, which the layers take from the step."""
        positions = torch.arange(capacity, device=self.embedding.device)[None]
        cos, sin = self._rotary(self.embedding[:0], positions)
        return Rotary(cos[0], sin[0])

    def copy_mtp_layer(self, layer: MTPLayer, k: int, copies: WeightCopies) -> MTPLayer:
        """The MTP layer of depth k + 1, called with `step=`."""
        made = MTPLayer.__new__(MTPLayer)
        nn.Module.__init__(made)
        made.concat_order = layer.concat_order
        made.hidden_norm = copies.norm(layer.hidden_norm)
        made.embed_norm = copies.norm(layer.embed_norm)
        made.proj = copies.linear(layer.proj)  # type: ignore[assignment]
        made.decoder = FusedDecoderLayer(layer.decoder, len(self.layers) + k, copies)
        made.final_norm = nn.Identity() if isinstance(layer.final_norm, nn.Identity) else copies.norm(layer.final_norm)
        return made


def _is_fusible(layer: Any) -> bool:
    parts = dict(layer.named_children())
    if set(parts) != _FUSED_LAYER:
        return False
    attention, mlp = parts["self_attn"], parts["mlp"]
    head_dim = getattr(attention, "head_dim", None)
    norms = [norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name, None)) is not None]
    if len(norms) == 1 or not set(dict(mlp.named_children())) <= _FUSED_MLP:
        return False
    return (
        not any(list(part.parameters(recurse=False)) for part in (layer, attention, mlp))
        and not {name for name, _ in attention.named_children()} - _FUSED_ATTENTION
        and hasattr(attention, "scaling")
        and all(norm.weight.shape == (head_dim,) for norm in norms)
        and all(
            hasattr(norm, "variance_epsilon")
            for norm in (*norms, layer.input_layernorm, layer.post_attention_layernorm)
        )
        and attention.q_proj.weight.shape[0] == attention.o_proj.weight.shape[1]
    )


class ModuleTrunk(nn.Module):
    """A trunk of transformers' own modules: anything that attends through the `AttentionInterface`, and delta nets.

    Args:
        trunk: transformers'.
        copies: where the weights go.

    Attributes:
        norm: the final norm, None where it has no known name.
        delta_nets: the recurrent layers.
    """

    def __init__(self, trunk: Any, copies: WeightCopies) -> None:
        super().__init__()
        self.module: Any = copies.module(trunk)
        self.norm = final_norm(self.module)
        self.delta_nets: list[GatedDeltaNet] = []
        for parent in list(self.module.modules()):
            for name, child in list(parent.named_children()):
                if GatedDeltaNet.is_one(child):
                    setattr(parent, name, GatedDeltaNet(child))
                    self.delta_nets.append(getattr(parent, name))

    def embed(self, tokens: Tensor) -> Tensor:
        """As in `FusedTrunk`, with what the model's embedding module does besides."""
        return self.module.get_input_embeddings()(tokens)

    def forward(self, tokens: Tensor, step: Step) -> Tensor:
        """As in `FusedTrunk`."""
        with running(step):
            return self.module(input_ids=tokens, position_ids=step.positions, use_cache=False).last_hidden_state

    def make_rotary(self, capacity: int) -> None:
        """None: transformers' layers rotate by themselves."""

    def copy_mtp_layer(self, layer: MTPLayer, k: int, copies: WeightCopies) -> MTPLayer:
        """As in `FusedTrunk`.

        Raises:
            UsageError: the layer is recurrent.
        """
        made: MTPLayer = copies.module(layer)
        if any(map(GatedDeltaNet.is_one, made.modules())):
            raise UsageError("the native engine cannot draft with a recurrent MTP layer: use one with attention")
        made.decoder = RowsDecoder(made.decoder, getattr(self.module, "rotary_emb", None))
        return made


Trunk = FusedTrunk | ModuleTrunk
