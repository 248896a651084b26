"""What a run leaves for people: samples with their accepted drafts, alarms; and what a resume does with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun.config import RLConfig
from forerun.report.metric_names import describe
from forerun.rollout.native.engine import NativeEngine
from forerun.trainers.alarms import AlarmError
from forerun.trainers.experience import token_pieces
from forerun.trainers.rl import RLTrainer
from tests.trainers.tiny_rl import MTP, settings, trainer

DRAFT = [*MTP, "mtp.enable_rollout=true", "trainer.total_steps=2"]


def speculative(config: RLConfig) -> RLTrainer:
    made = trainer(config)
    made.rollout = NativeEngine(made.engine.model, products="linear", num_speculative_tokens=2)  # type: ignore[attr-defined]
    return made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


@pytest.mark.parametrize("cut", [0, 1])
def test_pieces_of_tokens_make_up_the_text(cut: int) -> None:
    tokenizer = byte_tokenizer()
    token_ids = tokenizer.encode("a ü <b> 漢")
    token_ids = [*token_ids[: len(token_ids) - cut], tokenizer.eos_token_id]  # a character is cut short
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    pieces = token_pieces(token_ids, text, tokenizer)
    assert pieces is not None and len(pieces) == len(token_ids) and "".join(pieces) == text
    assert pieces[:4] == ["a", " ", "", "ü"]
    assert token_pieces(token_ids, "another text", tokenizer) is None
    assert token_pieces([], "", tokenizer) == []


def test_samples_tell_which_tokens_were_accepted_drafts(tmp_path: Path) -> None:
    made = speculative(settings(tmp_path, *DRAFT, "rollout.max_response_length=8"))
    made.train()
    rows = lines(tmp_path / "run" / "samples.jsonl")
    assert len(rows) == 16 and {row["step"] for row in rows} == {1, 2}
    for row in rows:
        assert "".join(row["tokens"]) == row["response"]
        assert len(row["tokens"]) == len(row["accepted_draft"])
    last = [sample.completion for sample in made.samples[:8]]
    assert [row["accepted_draft"] for row in rows[8:]] == [c.accepted_draft for c in last]
    assert any(any(row["accepted_draft"]) for row in rows)


def test_an_engine_that_cannot_say_leaves_them_unknown(tmp_path: Path) -> None:
    trainer(settings(tmp_path, "trainer.total_steps=1")).train()
    assert {row["accepted_draft"] for row in lines(tmp_path / "run" / "samples.jsonl")} == {None}


class Stale(NativeEngine):
    """Reports a digest of its own."""

    def drafter_digest(self) -> str:
        return "0" * 64


def mistaken(config: RLConfig) -> RLTrainer:
    made = trainer(config)
    made.rollout = Stale(made.engine.model, products="linear", num_speculative_tokens=2)  # type: ignore[attr-defined]
    return made


def test_alarms_are_written_and_rewound_with_the_rest(tmp_path: Path) -> None:
    mistaken(settings(tmp_path, *DRAFT, "trainer.save_freq=1")).train()
    path = tmp_path / "run" / "alarms.jsonl"
    first = lines(path)
    assert [alarm["name"] for alarm in first] == ["drafter_digest_mismatch"] * 3  # before the first step and after each
    assert all(alarm["message"].startswith("alarm drafter_digest_mismatch at step") for alarm in first)
    with path.open("a") as file:  # as if it had gone on past its last checkpoint
        file.write('{"name": "acceptance_never", "step": 3, "message": "later"}\n')
    speculative(settings(tmp_path, *DRAFT, "trainer.total_steps=4")).train()
    assert lines(path) == first


def test_an_alarm_that_stops_the_run_is_written(tmp_path: Path) -> None:
    with pytest.raises(AlarmError):
        mistaken(settings(tmp_path, *DRAFT, "trainer.on_alarm=stop")).train()
    (alarm,) = lines(tmp_path / "run" / "alarms.jsonl")
    assert alarm["name"] == "drafter_digest_mismatch" and alarm["step"] == 0


def test_every_metric_that_a_run_logs_is_documented(tmp_path: Path) -> None:
    speculative(settings(tmp_path, *DRAFT)).train()
    logged = {name for row in lines(tmp_path / "run" / "metrics.jsonl") for name in row} - {"step"}
    assert "acceptance_length" in logged and "log_prob_gap_mean" in logged
    assert not [name for name in sorted(logged) if describe(name) is None]
