"""Rank 1 of an SGLang weight-update group: `python join.py PORT GROUP FOLDER`. Receives what FOLDER/shapes.json
says."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import save_file
from sglang.srt.utils.common import init_custom_process_group

port, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
group = init_custom_process_group(
    backend="gloo",
    init_method=f"tcp://127.0.0.1:{port}",
    timeout=timedelta(seconds=120),
    world_size=2,
    rank=1,
    group_name=name,
)
received = {}
for key, (shape, dtype) in json.loads((folder / "shapes.json").read_text()).items():
    received[key] = torch.empty(shape, dtype=getattr(torch, dtype))
    torch.distributed.broadcast(received[key], src=0, group=group)
save_file(received, folder / "received.safetensors")
os._exit(0)  # gloo's threads may abort the interpreter on its way out
