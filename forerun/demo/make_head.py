"""Make the head that ships with the package, the one that `--head shipped` drafts with.

    python -m forerun.demo.make_head WORK_DIR forerun/demo/smollm2_head.safetensors

The demo's own recipe on more of the packaged text. Writes the head's tensors under their family's names, in bfloat16,
and prints the held-out figures of its training.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save

from forerun.demo.head import train_head
from forerun.demo.options import FULL, DemoOptions
from forerun.demo.workspace import Workspace
from forerun.models.carrier import mtp_weight_names, named_weights
from forerun.report.atomic import write_bytes

SIZES = replace(FULL, train_tokens=250_000)


def main(work_dir: Path, target: Path) -> None:
    workspace = Workspace(DemoOptions(out=work_dir))
    workspace.sizes = SIZES
    figures = train_head(workspace)
    model = workspace.trained_model(workspace.sft_model)
    head = set(mtp_weight_names(model).values())
    write_bytes(
        target, save({name: tensor.to(torch.bfloat16) for name, tensor in named_weights(model) if name in head})
    )
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    main(args.work_dir, args.target)
