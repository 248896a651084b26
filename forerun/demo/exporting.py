"""Phase 5: the trained model as a Hugging Face directory, opened again by a process that knows nothing else.

Run as a module it is that process: `python -m forerun.demo.exporting MODEL_DIR TEXT.json` prints one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forerun.data.packing import Document
from forerun.demo import self_text
from forerun.demo.workspace import Workspace
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import ForerunError
from forerun.models.carrier import MTPCarrier, mtp_weight_names
from forerun.models.loading import load
from forerun.report.atomic import write_text
from forerun.rollout.sync import digest
from forerun.trainers.batching import Rows

ROW_LENGTH = 448


def export_model(workspace: Workspace) -> dict[str, Any]:
    """Write the model, reload it in a new process, and compare digest and held-out acceptance."""
    model = load(workspace.rl_model)
    assert isinstance(model, MTPCarrier)
    target = workspace.exported_model
    model.save_pretrained(target)
    workspace.tokenizer.save_pretrained(target)
    text = workspace.out / "held_out.json"
    write_text(text, json.dumps([vars(response) for response in workspace.held_out_text]))
    here = figures(model, text)
    command = [sys.executable, "-m", "forerun.demo.exporting", str(target), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ForerunError(f"the exported model at {target} cannot be opened again: {last[0]}")
    there = json.loads(done.stdout.splitlines()[-1])
    return {
        "mtp_tensors": len(mtp_weight_names(model)),
        "same_digest": here["digest"] == there["digest"],
        "same_acceptance": here["acceptance"] == there["acceptance"],
        "digest": there["digest"],
        "acceptance": there["acceptance"],
    }


def figures(model: MTPCarrier, text: Path) -> dict[str, Any]:
    """Digest of all weights, and agreement with the trunk on held-out text (None where it is too short for any)."""
    responses = [self_text.Response(**row) for row in json.loads(text.read_text())]
    documents: list[Document] = [response.document(prompt_too=False) for response in responses]
    engine = TorchEngine(model, TorchEngineConfig(train_trunk=True))
    found = engine.evaluate(Rows(documents, ROW_LENGTH, packing=True))
    return {"digest": digest(engine.named_weights()), "acceptance": found.get("mtp/depth_1/trunk_top1")}


def main(arguments: Sequence[str]) -> None:
    model_dir, text = arguments
    model = load(model_dir, dtype=torch.float32)
    assert isinstance(model, MTPCarrier)
    print(json.dumps(figures(model, Path(text))))


if __name__ == "__main__":
    main(sys.argv[1:])
