"""Train the head that ships with the package: the demo's own recipe on all of the packaged text, for longer.

    python -m forerun.demo.make_head OUT_DIR

An hour of one core or less; writes `OUT_DIR/smollm2_head.safetensors` (bfloat16) and the figures of its training.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save

from forerun.demo.head import train_head
from forerun.demo.options import FULL, DemoOptions
from forerun.demo.workspace import SHIPPED_HEAD, Workspace
from forerun.models.carrier import mtp_weight_names, named_weights
from forerun.report.atomic import write_bytes, write_text

LONGER = replace(FULL, train_tokens=10**9, epochs=8)


def main(out: Path) -> None:
    workspace = Workspace(DemoOptions(out=out))
    workspace.sizes = LONGER
    figures = train_head(workspace)
    model = workspace.trained_model(workspace.sft_model)
    head = set(mtp_weight_names(model).values())
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in named_weights(model) if name in head}
    write_bytes(out / SHIPPED_HEAD, save(tensors))
    write_text(out / "head.json", json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures["held_out_acceptance"]["trained"]["all"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
