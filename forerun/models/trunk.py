"""The parts of a Hugging Face causal LM that MTP hangs on: trunk, embedding, LM head, rotary embedding, causal mask."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from forerun.errors import UsageError


def base_model(model: PreTrainedModel) -> nn.Module:
    """The trunk: the module whose output the LM head takes."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


class UndoNorm:
    """Hidden states after an RMS norm -> before it, up to a positive factor per position.

    A block whose own norm comes first does not see that factor (epsilons apart), so dividing by the norm's weight is
    all there is to undo. No module: the norm stays the trunk's alone, also in a copy of the model.

    Raises:
        UsageError: on construction, the norm's weight has zeros, or it is no RMS norm.
    """

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm
        weight = cast(Tensor, norm.weight)
        if not weight.is_meta and not bool(self.weight(weight).all()):
            raise UsageError(
                "the trunk's final norm has a zero weight, or is no RMS norm: this family's MTP block reads the hidden "
                "before that norm, which cannot be told from what comes after it"
            )

    def weight(self, like: Tensor) -> Tensor:
        """What the norm multiplies each feature by, [d], however it is parametrised (1 + weight, for instance)."""
        return self.norm(torch.ones(like.shape[-1], dtype=like.dtype, device=like.device))

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight(hidden_states)
        # Hiddens without a graph are data, and so is the norm that made them.
        return hidden_states / (weight if hidden_states.requires_grad else weight.detach())


def final_norm(trunk: nn.Module) -> nn.Module | None:
    """The trunk's norm behind its last layer; None where it has none under a name that is known."""
    found = getattr(trunk, "norm", None) or getattr(trunk, "norm_f", None)
    return found if isinstance(found, nn.Module) else None


def project(model: PreTrainedModel, hidden_states: Tensor, vocabulary: Tensor | None = None) -> Tensor:
    """Logits [..., V] of hiddens [..., d], scaled and soft-capped as the model's own forward does.

    With `vocabulary` (long [v], token ids) only those tokens' logits [..., v], in that order.
    """
    head: Any = model.get_output_embeddings()
    if vocabulary is None:
        logits = head(hidden_states)
    else:
        bias = None if head.bias is None else head.bias[vocabulary]
        logits = torch.nn.functional.linear(hidden_states, head.weight[vocabulary], bias)
    return scale_logits(logits, model.config.get_text_config())


def scale_logits(logits: Tensor, config: Any) -> Tensor:
    """What some models' forward does to the LM head's output; `config` is that of the language model."""
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * factor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


def embed(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Token embeddings [..., d] as the trunk's first layer gets them."""
    return model.get_input_embeddings()(input_ids)


def decoder_inputs(
    model: PreTrainedModel,
    hidden_states: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
) -> dict[str, Any]:
    """Keyword arguments for a decoder layer run without a cache over `hidden_states` [B, S, d].

    The mask is the one that the trunk itself would build from the same arguments, so packed documents (position_ids
    that restart) and padding (a 2D attention_mask) are kept apart in the MTP block exactly as in the trunk. A trunk
    without rotary embedding passes none on.
    """
    trunk: Any = base_model(model)
    family = getattr(model, "mtp_family", None)  # of a carrier, whose module imports this one
    mask = create_causal_mask(
        config=trunk.config,
        inputs_embeds=hidden_states,
        attention_mask=attention_mask,
        cache=None,
        position_ids=position_ids,
        allow_is_causal_skip=family is None or not family.always_masked,
    )
    inputs = {"attention_mask": mask, "position_ids": position_ids, "use_cache": False}
    if (rotary := getattr(trunk, "rotary_emb", None)) is not None:
        inputs["position_embeddings"] = rotary(hidden_states, position_ids)
    return inputs
