"""The demo's phases on a tiny model of the user's own: every promise, in seconds; CI runs the real model besides."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from forerun.demo import DemoOptions, options, run, self_text, workspace
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.loading import load
from forerun.trainers.batching import Rows
from tests.families.tiny import tiny_trunk

pytestmark = pytest.mark.model  # for its tokenizer

TINY = replace(
    options.QUICK,
    train_tokens=2_000,
    held_out_tokens=800,
    fit_tokens=2_000,
    epochs=1,
    rollout_prompts=8,
    rollout_tokens=8,
    rl_steps=2,
    rl_prompts=1,
    rl_samples=2,
    rl_tokens=6,
)


@pytest.fixture(scope="module")
def model_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": 2, "tie_word_embeddings": True}
    tiny_trunk("attached", **ids, hidden_size=32, max_position_embeddings=2048).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "QUICK", TINY)
    monkeypatch.setattr(workspace, "OWN_TEXT_TOKENS", {True: 6_000, False: 6_000})
    monkeypatch.setattr(self_text, "MAX_NEW_TOKENS", 16)


def test_every_phase_and_then_nothing_twice(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = DemoOptions(quick=True, out=tmp_path / "out", seed=3, model=model_dir)
    assert run(chosen) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    figures = summary["figures"]
    assert list(figures) == ["load", "sft", "rollout", "rl", "export"]
    assert summary["seeds"] == {"seed": 3}
    assert figures["load"]["mtp_layers"] == 1
    stages = figures["sft"]["held_out_acceptance"]
    assert stages["fitted"]["all"]["expected_acceptance"] > stages["attached"]["all"]["expected_acceptance"]
    for batch in ("batch_1", "batch_8"):
        assert figures["rollout"][batch]["drafts_1"]["identical_greedy_text"]
    assert figures["rl"]["drafter_in_sync_every_step"]
    assert figures["export"]["same_digest"] and figures["export"]["same_acceptance"]
    exported = load(tmp_path / "out" / "model")
    assert isinstance(exported, MTPCarrier)
    assert not list((tmp_path / "out").glob("*/checkpoint-*")), "checkpoints of finished phases are of no use"

    monkeypatch.setattr("forerun.demo.head.train_head", None)  # would fail if it were called again
    assert run(chosen) == 0
    said = capsys.readouterr().err
    assert "done earlier" in said
    # Tokens are counted, and from the second batch size on it is known how many there will be.
    (expected,) = re.findall(r"rollout, batch 8: (\d+) tokens to do", said)
    assert re.search(rf"rollout, batch 1: done in \S+  {expected} tokens", said)
    assert re.search(rf"rollout, batch 8: done in \S+  {expected} tokens", said)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["figures"] == figures

    with pytest.raises(UsageError, match=r"other options \(seed\)"):
        run(replace(chosen, seed=4))


def test_an_interrupt_is_one_line_and_the_next_run_goes_on(model_dir: Path, tmp_path: Path) -> None:
    """Ctrl-C during the head's training: what was finished stays, and the second run does not do it again."""
    command = [sys.executable, "-m", "forerun.cli", "demo", "--quick", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*command, "--model", str(model_dir)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Where the tests run in the background, a shell has set SIGINT to be ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    state = tmp_path / "out" / "phases.json"
    deadline = time.monotonic() + 300
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert json.loads(state.read_text())["done"] == ["load"]
    assert not list((tmp_path / "out").rglob("*.partial"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: DemoOptions(out=path / "file"), "is a file"),
        (lambda path: DemoOptions(out=path / "o", model=path / "absent"), "not a directory"),
        (lambda path: DemoOptions(out=path / "o", model=path, head="shipped"), "head for SmolLM2"),
    ],
)
def test_options_that_cannot_be(make, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=message):
        run(make(tmp_path))


def test_the_packaged_text_is_what_its_recipe_says() -> None:
    responses = self_text.packaged()
    by_split = {split: {tuple(r.prompt_ids) for r in responses if r.split == split} for split in self_text.SPLITS}
    assert by_split["train"] and by_split["held_out"]
    assert not by_split["train"] & by_split["held_out"], "a held-out prompt is trained on"
    assert {r.source for r in responses} == set(self_text.SOURCES)
    assert max(len(r.response_ids) for r in responses) <= 192


def test_the_shipped_head_drafts_for_smollm2(smollm2_dir: Path, tmp_path: Path) -> None:
    """Agreement with the trunk on held-out text that the package carries; a head that is not loaded has none."""
    place = workspace.Workspace(DemoOptions(quick=True, out=tmp_path / "out", head="shipped"))
    model = place.drafting_model()
    rows = Rows([r.document(prompt_too=False) for r in place.held_out_text], 448, packing=True)
    engine = TorchEngine(model, TorchEngineConfig(train_trunk=False))
    assert engine.evaluate(rows[:2])["mtp/depth_1/trunk_top1"] > 0.35
