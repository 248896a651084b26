"""Hugging Face's Trainer over ranks trains the block as one process does, with the same rows in every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.hf_ranks import run

ROOT = Path(__file__).parents[2]


def on_ranks(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    place.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, "-m", "tests.trainers.hf_ranks", str(place), *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("family", ["attached", "attached_moe"])
def test_two_ranks_train_the_block_as_one_process_does(family: str, tmp_path: Path) -> None:
    done = on_ranks(tmp_path / "two", "2", family)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("MTP block gets that part of its gradient unless the trainer gets callbacks=") == 2
    (tmp_path / "one").mkdir()
    run(tmp_path / "one", 4, family)
    alone = load_file(tmp_path / "one" / "0.safetensors")
    first, second = (load_file(tmp_path / "two" / f"{rank}.safetensors") for rank in range(2))
    assert alone.keys() == first.keys() == second.keys()
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-7, msg=name)
