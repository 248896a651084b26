"""Ask a script that runs in an oracle's environment: settings and tensors in, tensors out, all through files.

The script is started as `python script.py FOLDER`. It finds FOLDER/settings.json and FOLDER/given.safetensors and
leaves its answer in one or more files FOLDER/answer*.safetensors (one per process, say).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
TIMEOUT_S = 300.0


def run_script(interpreter: Path, script: str, *arguments: str) -> str:
    """What tests/oracles/`script` prints on standard output. The repository is not importable there.

    Raises:
        AssertionError: it failed; the message holds the end of what it wrote.
    """
    done = subprocess.run(
        [str(interpreter), "-E", str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{script} ended with code {done.returncode}:\n{done.stderr[-4000:]}"
    return done.stdout


def ask(interpreter: Path, script: str, folder: Path, settings: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that tests/oracles/`script` answers with."""
    (folder / "settings.json").write_text(json.dumps(settings))
    save_file(
        {name: tensor.detach().contiguous().clone() for name, tensor in given.items()}, folder / "given.safetensors"
    )
    run_script(interpreter, script, str(folder))
    answer: dict[str, Tensor] = {}
    for file in sorted(folder.glob("answer*.safetensors")):
        answer |= load_file(file)
    return answer
