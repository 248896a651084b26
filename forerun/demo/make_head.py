"""Make the head that ships with the package out of a finished demo run: what `--head shipped` drafts with.

    forerun demo --out RUN_DIR
    python -m forerun.demo.make_head RUN_DIR forerun/demo/smollm2_head.safetensors

The head's tensors under their family's names, in bfloat16.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save

from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.models.loading import load
from forerun.report.atomic import write_bytes


def main(run_dir: Path, target: Path) -> None:
    model = load(run_dir / "sft" / "model")
    assert isinstance(model, MTPCarrier)
    head = set(mtp_weight_names(model).values())
    write_bytes(
        target, save({name: tensor.to(torch.bfloat16) for name, tensor in named_weights(model) if name in head})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
