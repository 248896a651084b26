"""Layouts that serving engines draft with, and the trunks that fit into them: what `forerun convert --to` can write.

A trunk of another model type may have the same tensor names and compute something else with them (scaled embeddings,
interleaved rotary embedding, layers without it), so types are listed here, not guessed from names.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.families.mimo import MIMO
from forerun.families.record import FamilyRecord

_YARN = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
    "mscale",
    "mscale_all_dim",
)


@dataclass(frozen=True)
class Target:
    """One layout.

    Attributes:
        family: of the checkpoint that is written.
        trunks: model types that compute what the target's trunk computes, where the checks on values pass.
        projections: parts of the trunk's and the block's decoder layers, as (name, has a bias in the target).
        activation: the MLP's.
        rope_keys: rope type that the engine has -> keys of config.json's rope_parameters that it and transformers read
            in the same way, besides rope_type and rope_theta.
        code: name of the Python file that defines the configuration, and of the class in it; what engines run under
            trust_remote_code.
        source: where these facts were read.
    """

    family: FamilyRecord
    trunks: tuple[str, ...]
    projections: tuple[tuple[str, bool], ...]
    activation: str
    rope_keys: tuple[tuple[str, tuple[str, ...]], ...]
    code: tuple[str, str]
    source: str


TARGETS: dict[str, Target] = {
    "mimo": Target(
        family=MIMO,
        trunks=("llama", "mistral", "qwen2"),
        projections=(
            ("self_attn.q_proj", True),
            ("self_attn.k_proj", True),
            ("self_attn.v_proj", True),
            ("self_attn.o_proj", False),
            ("mlp.gate_proj", False),
            ("mlp.up_proj", False),
            ("mlp.down_proj", False),
        ),
        activation="silu",
        rope_keys=(
            ("default", ()),
            ("linear", ("factor",)),
            ("llama3", ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
            ("yarn", _YARN),
        ),
        code=("configuration_mimo.py", "MiMoConfig"),
        source="vLLM 0.32 model_executor/models/{mimo,mimo_mtp,qwen2}.py and layers/rotary_embedding",
    ),
}
