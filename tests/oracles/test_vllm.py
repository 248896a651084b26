"""vLLM serves what we write: lossless text, and every draft accepted or rejected as our model says.

Each checkpoint is served greedily with method mtp and without: texts must be equal. vLLM reports how many tokens of
each draft it accepted; our model replays the steps on vLLM's text, in float32 with the same weights, and must come to
the same number each time. Only where two choices are equal up to the engine's rounding may the two differ.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

import forerun
from forerun.data.gguf import smollm2
from forerun.demo.workspace import load_shipped_head, mtp_config
from forerun.families.serving import TARGETS
from forerun.models import configuration_mimo
from forerun.models.carrier import MTPCarrier
from forerun.models.serving import export
from forerun.models.trunk import UndoNorm, base_model, final_norm
from tests.oracles import served_models
from tests.oracles.exchange import ask, run_script
from tests.oracles.replay import replay

pytestmark = pytest.mark.oracle

DRAFT = 2  # tokens per draft: the second depends on what one depth hands to the next
TOKENS = 40
# Differences of logits, which are of the order of 10, that the engine's rounding can turn around.
TIES = {torch.float32: 1e-3, torch.bfloat16: 0.2}
# Half of them are one token: vLLM's drafters of some families are blind to the embedding at position 0, and there the
# first draft is made from it.
PROMPTS = [[(37 * i + 3 * j * j) % (served_models.VOCAB - 1) + 1 for j in range(max(1, i - 6))] for i in range(16)]
QUESTIONS = [
    "What is 12 * 7 + 5?",
    "Write the word apple three times.",
    "Anna has 3 boxes with 12 eggs each. She sells 10 eggs. How many are left?",
    "What is the capital of France?",
]


@dataclass
class Served:
    """A checkpoint and what vLLM wrote with it, in `dtype`. `answers`: name of the run -> what serve.py says of it."""

    model: MTPCarrier
    dtype: torch.dtype
    prompts: list[list[int]]
    answers: dict[str, Any]

    @property
    def tie(self) -> float:
        return TIES[self.dtype]

    def disagreements(self, model: MTPCarrier) -> list[tuple[int, int, float]]:
        """(accepted by vLLM, accepted by our model, margin of our choice), of every draft where the two differ."""
        answer = self.answers["mtp"]
        found = []
        for prompt, text, accepted in zip(self.prompts, answer["texts"], answer["accepted"], strict=True):
            steps = replay(model, prompt, text, DRAFT, accepted)
            assert len(accepted) - len(steps) <= 2  # whose drafts reach beyond the text
            found += [
                (theirs, ours.accepted, ours.margin)
                for theirs, ours in zip(accepted, steps, strict=False)
                if theirs != ours.accepted
            ]
        return found


def serve(interpreter: Path, folder: Path, runs: list[dict[str, Any]]) -> dict[str, Any]:
    (folder / "settings.json").write_text(json.dumps(runs))
    run_script(interpreter, "vllm/serve.py", str(folder))
    return json.loads((folder / "answer.json").read_text())


def run(name: str, model: Path, dtype: torch.dtype, k: int, prompts: list[list[int]]) -> dict[str, Any]:
    precision = str(dtype).removeprefix("torch.")
    return {"name": name, "model": str(model), "dtype": precision, "k": k, "max_tokens": TOKENS, "prompts": prompts}


def save(model: MTPCarrier, path: Path) -> None:
    model.save_pretrained(path)
    if model.mtp_family.trunk_model_type is not None:  # real carriers bring the definition of their configuration
        shutil.copy(configuration_mimo.__file__, path)
        config = json.loads((path / "config.json").read_text())
        config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
        (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=sorted(served_models.TRUNKS))
def family(request: pytest.FixtureRequest, vllm_env: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A tiny checkpoint of a family, served three ways in one process: speculatively, plainly, and the perfect one."""
    name = request.param
    dtype = served_models.DTYPES.get(name, torch.float32)
    folder = tmp_path_factory.mktemp(name)
    mixed, perfect = folder / "mixed", folder / "perfect"
    save(served_models.mixed(name).to(dtype), mixed)
    save(served_models.perfect(name).to(dtype), perfect)
    runs = [
        run("mtp", mixed, dtype, DRAFT, PROMPTS),
        run("plain", mixed, dtype, 0, PROMPTS),
        run(
            "perfect", perfect, dtype, DRAFT, [prompt for prompt in PROMPTS if len(prompt) > 1]
        ),  # sees every embedding
    ]
    answers = serve(vllm_env, folder, runs)
    model = forerun.load(mixed)
    assert isinstance(model, MTPCarrier)
    return Served(model.eval(), dtype, PROMPTS, answers)


@pytest.fixture(scope="module")
def smollm2_as_mimo(vllm_env: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """SmolLM2 with the head that ships with the package, exported for vLLM."""
    folder = tmp_path_factory.mktemp("smollm2")
    attached, exported = folder / "attached", folder / "mimo"
    trunk = forerun.load(smollm2(report=print))
    model = forerun.attach(trunk, mtp_config())
    load_shipped_head(model)
    model.save_pretrained(attached)
    export(attached, exported)
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in QUESTIONS
    ]
    runs = [run("mtp", exported, torch.float32, DRAFT, prompts), run("plain", exported, torch.float32, 0, prompts)]
    answers = serve(vllm_env, folder, runs)
    served = forerun.load(exported)
    assert isinstance(served, MTPCarrier)
    shutil.rmtree(folder)  # a gigabyte
    return Served(served.eval(), torch.float32, prompts, answers)


def check_text(served: Served) -> None:
    plain = served.answers["plain"]["texts"]
    assert plain == served.answers["mtp"]["texts"]
    for prompt, text in zip(served.prompts, plain, strict=True):
        with torch.no_grad():
            logits = served.model(torch.tensor([prompt + text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=-1).values
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (best - chosen).max() < served.tie, "vLLM's trunk writes what ours would not"


def check_acceptance(served: Served) -> None:
    answer = served.answers["mtp"]
    steps = [step for accepted in answer["accepted"] for step in accepted]
    drafted = [step for drafted in answer["drafted"] for step in drafted]
    assert set(drafted) == {DRAFT}
    assert answer["counters"] == {
        "drafts": len(steps),
        "draft_tokens": sum(drafted),
        "accepted_tokens": sum(steps),
        "accepted_tokens_per_pos": [sum(step > position for step in steps) for position in range(DRAFT)],
    }
    # A rate that could not be luck, either way: with all or none accepted, many a wrong formula would agree.
    assert 0.2 < sum(step > 0 for step in steps) / len(steps) < 0.8
    disagreements = served.disagreements(served.model)
    assert all(margin < served.tie for *_, margin in disagreements), disagreements


def test_text_is_that_without_speculation(family: Served) -> None:
    check_text(family)


def test_every_draft_is_accepted_as_our_model_says(family: Served) -> None:
    check_acceptance(family)


def test_a_perfect_drafter_is_always_right(family: Served) -> None:
    answer = family.answers["perfect"]
    assert all(len(set(text)) > TOKENS / 2 for text in answer["texts"])
    accepted, drafted = answer["accepted"], answer["drafted"]
    assert accepted == drafted and answer["counters"]["accepted_tokens"] == answer["counters"]["draft_tokens"] > 0


@pytest.mark.parametrize("mistake", ["concat_order", "trunk_hidden", "recurrence", "position_0", "final_norm"])
def test_each_part_of_the_formula_shows(family: Served, mistake: str) -> None:
    """The check above sees a mistake: with it, our model no longer accepts what vLLM accepts."""
    model, layer = family.model, family.model.mtp.layer(1)
    before = (model.mtp_family, model.mtp.undo_norm, layer.concat_order, layer.final_norm)
    record = model.mtp_family
    try:
        if mistake == "concat_order":
            layer.concat_order = "embed_hidden" if layer.concat_order == "hidden_embed" else "hidden_embed"
        elif mistake == "trunk_hidden":
            undo = UndoNorm(final_norm(base_model(model)))
            model.mtp.undo_norm = undo if model.mtp.undo_norm is None else None
        elif mistake == "recurrence":
            used = record.engine_recurrence or record.recurrence
            wrong = "post_norm" if used == "pre_norm" else "pre_norm"
            model.mtp_family = replace(record, engine_recurrence=wrong)
        elif mistake == "position_0":
            model.mtp_family = replace(record, engine_zeroes_position_0=not record.engine_zeroes_position_0)
        else:
            layer.final_norm = torch.nn.Identity()
        assert any(margin > family.tie for *_, margin in family.disagreements(model))
    finally:
        model.mtp_family, model.mtp.undo_norm, layer.concat_order, layer.final_norm = before


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_all": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
    },
    "yarn_scales": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
}


def test_vllm_turns_by_the_angles_of_transformers(vllm_env: Path, tmp_path: Path) -> None:
    """For every kind of rotary embedding that an export may have."""
    positions, head_size = 256, 32
    ropes = {name: rope | {"rope_theta": 5000.0} for name, rope in ROPES.items()}
    assert {rope["rope_type"] for rope in ropes.values()} == {kind for kind, _ in TARGETS["mimo"].rope_keys}
    assert {key for rope in ROPES.values() for key in rope} - {"rope_type"} == {
        key for _, keys in TARGETS["mimo"].rope_keys for key in keys
    }
    theirs = ask(vllm_env, "vllm/rope.py", tmp_path, ropes | {"head_size": head_size, "positions": positions}, {})
    for name, rope in ropes.items():
        config = Qwen2Config(
            hidden_size=2 * head_size,
            num_attention_heads=2,
            max_position_embeddings=positions,
            rope_parameters=rope,
        )
        cos, sin = Qwen2RotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
        for part, ours in (("cos", cos), ("sin", sin)):
            # Angles reach 256 radians, of which float32 keeps five digits.
            torch.testing.assert_close(theirs[f"{name}.{part}"], ours[0, :, : head_size // 2], atol=1e-4, rtol=0.0)


def test_text_of_an_exported_head_is_that_without_speculation(smollm2_as_mimo: Served) -> None:
    check_text(smollm2_as_mimo)


def test_every_draft_of_an_exported_head_is_accepted_as_our_model_says(smollm2_as_mimo: Served) -> None:
    check_acceptance(smollm2_as_mimo)
