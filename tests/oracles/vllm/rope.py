"""Runs in vLLM's environment: its rotary embeddings.

FOLDER/settings.json holds {name: rope_parameters}, and the numbers "head_size" and "positions". The answer has
name.cos and name.sin, float32 [positions, head_size / 2].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    head_size, positions = settings.pop("head_size"), settings.pop("positions")
    answer = {}
    with set_current_vllm_config(VllmConfig()):
        for name, parameters in settings.items():
            cache = get_rope(head_size, max_position=positions, rope_parameters=parameters).cos_sin_cache[:positions]
            cos, sin = cache.float().chunk(2, dim=-1)
            answer |= {f"{name}.cos": cos.contiguous(), f"{name}.sin": sin.contiguous()}
    save_file(answer, folder / "answer.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
