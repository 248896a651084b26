"""What a run says before it loads anything."""

from __future__ import annotations

import pytest
import torch

from forerun.config import EngineConfig, ModelConfig, SFTConfig
from forerun.trainers.checks import warn_of_float32


@pytest.mark.parametrize(
    ("engine", "dtype", "ranks", "device", "said"),
    [
        (EngineConfig(), "float32", 1, "cuda", "set engine.autocast=bfloat16"),
        (EngineConfig(), "float32", 2, "cuda", "set engine.param_dtype=bfloat16"),
        (EngineConfig(strategy="megatron"), "float32", 8, "cuda", "set model.dtype=bfloat16"),
        (EngineConfig(), "float32", 1, "cpu", None),
        (EngineConfig(), "bfloat16", 1, "cuda", None),
        (EngineConfig(autocast="bfloat16"), "float32", 1, "cuda", None),
        (EngineConfig(param_dtype="bfloat16"), "float32", 2, "cuda", None),
    ],
)
def test_a_gpu_that_computes_in_float32_is_told(
    engine: EngineConfig, dtype: str, ranks: int, device: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_float32(SFTConfig(model=ModelConfig(dtype=dtype), engine=engine), ranks, torch.device(device))  # type: ignore[arg-type]
    assert (caplog.messages == []) if said is None else caplog.messages[0].endswith(said)
