"""What a family of MTP-carrying checkpoints looks like, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.mtp.block import ConcatOrder, Recurrence


@dataclass(frozen=True)
class FamilyRecord:
    """One family.

    Attributes:
        name: the family's own.
        model_types: values of `model_type` in config.json that belong to it.
        depth_key: config.json's key for the number of MTP layers.
        tensor_names: pairs (parameter prefix in `forerun.mtp.MTPLayer`, prefix in the checkpoint); `{k}` is the depth
            counted from 0. The longest matching prefix wins.
        concat_order: which half of the projection's input is the hidden.
        trunk_hidden: what the first depth takes of the trunk, the hidden after its final norm (as the LM head does) or
            before it.
        recurrence: what the next depth takes, the hidden after the final norm or before it.
        final_norm: whether a norm follows the decoder layer.
        trunk_model_type: the transformers model whose code runs the trunk, where transformers has none under the
            family's own `model_type`.
        architecture: config.json's `architectures` entry, where `trunk_model_type` is set.
        engine_zeroes_position_0: vLLM zeroes the drafter's embedding at position 0; no trainer does.
        source: where these facts were read.
    """

    name: str
    model_types: tuple[str, ...]
    depth_key: str
    tensor_names: tuple[tuple[str, str], ...]
    concat_order: ConcatOrder
    trunk_hidden: Literal["post_norm", "pre_norm"] = "post_norm"
    recurrence: Recurrence = "post_norm"
    final_norm: bool = True
    trunk_model_type: str | None = None
    architecture: str | None = None
    engine_zeroes_position_0: bool = False
    source: str = ""

    def tensor_name(self, k: int, parameter: str) -> str:
        """The checkpoint's name for a parameter of the MTP layer at depth k + 1.

        Raises:
            KeyError: no prefix covers it; a live parameter must never be skipped.
        """
        for ours, theirs in sorted(self.tensor_names, key=lambda pair: -len(pair[0])):
            if parameter.startswith(ours):
                return theirs.format(k=k) + parameter[len(ours) :]
        raise KeyError(f"family {self.name!r} has no name for the MTP parameter {parameter!r}")
