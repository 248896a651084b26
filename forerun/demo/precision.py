"""Which precision the trunk's forward is fastest in on this machine: CPUs differ by a factor of five, either way."""

from __future__ import annotations

import time

import torch
from transformers import PreTrainedModel

from forerun.config import Autocast
from forerun.models.trunk import base_model

TOKENS = 256


@torch.no_grad()
def fastest_autocast(model: PreTrainedModel) -> Autocast:
    """Answers "bfloat16" where a forward under bfloat16 autocast is clearly faster than in the weights' own dtype."""
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=model.device)
    seconds = {}
    for dtype in (None, torch.bfloat16):
        with torch.autocast(model.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            base_model(model)(input_ids=ids, use_cache=False)  # the first forward also sets things up
            started = time.perf_counter()
            base_model(model)(input_ids=ids, use_cache=False)
            seconds[dtype] = time.perf_counter() - started
    return "bfloat16" if seconds[torch.bfloat16] < 0.8 * seconds[None] else "none"
