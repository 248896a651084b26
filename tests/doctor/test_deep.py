"""The doctor runs a head whose every prediction is known: over a language in which each word has one successor.

The trunk's layers add (next to) nothing, its embedding is one-hot, its LM head maps a word to its successor; so the
hidden at position i says t_i, and the trunk's choice is successor(t_i). A projection of the hidden half by a matrix M
then makes a head that foresees exactly what M says, and every fault can be put into it.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forerun import MTPConfig, attach, cli, load
from forerun.checkpoint.findings import Inspection
from forerun.doctor.deep import ROW_LENGTH, judge, load_rows, look_deep, read_texts
from forerun.doctor.forward import Row, Scores, constant_guess, score, shuffled, trunk_rows
from forerun.models.carrier import MTPCarrier
from forerun.models.training import mtp_forward
from tests.families.handmade import PARTS, checkpoint

WORDS = 64
ONE = torch.eye(WORDS)
NEXT = ONE.roll(1, dims=0)  # NEXT @ one_hot(t) = one_hot(t + 1): the successor of a word is the next one


def model_that(*hidden_parts: Tensor, final_norm: float = 1.0) -> MTPCarrier:
    """A head of one depth for each of `hidden_parts`, the projection's matrix for the hidden half."""
    torch.manual_seed(0)
    trunk = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WORDS,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
    )
    model = attach(trunk, MTPConfig(enable=True, num_layers=len(hidden_parts)), init="plain").eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(ONE)
        model.lm_head.weight.copy_(NEXT * final_norm)
        model.model.norm.weight.fill_(final_norm)
        layers = [*model.model.layers, *(layer.decoder for layer in model.mtp.layers)]
        for layer in layers:  # (next to) silent
            layer.self_attn.o_proj.weight.mul_(1e-4)
            layer.mlp.down_proj.weight.mul_(1e-4)
        for layer, part in zip(model.mtp.layers, hidden_parts, strict=True):
            layer.hidden_norm.weight.fill_(1.0)
            layer.final_norm.weight.fill_(final_norm)
            layer.proj.weight.copy_(torch.cat([part, 0.001 * torch.randn(WORDS, WORDS)], dim=1))
    return model


def language(length: int = 200) -> list[Tensor]:
    return [(torch.arange(length) + start) % WORDS for start in (0, 31)]


def judged(model: MTPCarrier) -> tuple[dict, Inspection]:
    inspection = Inspection("here", "attached", "llama", model.mtp.num_depths, model.mtp.num_depths)
    return judge(model, trunk_rows(model, language()), inspection), inspection


def test_a_perfect_head() -> None:
    figures, inspection = judged(model_that(NEXT))
    assert inspection.healthy, inspection.problems
    (depth,) = figures["depths"]
    assert depth["acceptance"] == 1.0 and depth["positions"] == 2 * 197
    controls = depth["controls"]
    assert controls["target_before"] == controls["target_after"] == 0.0 and controls["shuffled_head"] < 0.2
    assert figures["constant_guess"] < 0.05 and figures["ln_vocabulary"] == pytest.approx(math.log(WORDS))
    assert figures["concat_order"]["other_acceptance"] < 0.2
    assert figures["recurrence"]["acceptance"]["post_norm"] == 1.0


def test_scores_are_those_of_training() -> None:
    """Acceptance and loss are what `mtp_forward` counts, at both depths of a head that is right now and then."""
    model = model_that(NEXT + 2.5 * torch.rand(WORDS, WORDS), NEXT)
    ids = torch.randint(0, WORDS, (1, 90), generator=torch.Generator().manual_seed(3))
    rows = trunk_rows(model, [ids[0]])
    stats = mtp_forward(
        model,
        rows[0].hidden_states,
        input_ids=ids,
        position_ids=torch.arange(90)[None],
        document_ids=torch.zeros_like(ids),
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        compare_with_trunk=True,
    ).stats.compute()
    for depth in (1, 2):
        (found,) = score(model, rows, depth, model.mtp.recurrence)
        assert found.count == 90 - depth - 1
        assert found.mean_loss == pytest.approx(stats[f"mtp/depth_{depth}/loss"], rel=1e-5)
        assert found.acceptance == pytest.approx(stats[f"mtp/depth_{depth}/trunk_top1"])
    assert 0.0 < score(model, rows, 1, "post_norm")[0].acceptance < 1.0


def test_concat_order() -> None:
    """Fault 13: the halves lie in the other order."""
    model = model_that(NEXT)
    with torch.no_grad():
        weight = model.mtp.layers[0].proj.weight
        weight.copy_(weight.roll(WORDS, dims=1))
    figures, inspection = judged(model)
    assert [p.kind for p in inspection.problems] == ["concat_order"]
    assert "swap the halves" in inspection.problems[0].mend
    assert figures["concat_order"]["other_acceptance"] == 1.0


def test_trunk_hidden() -> None:
    """A head trained after the trunk's norm, which here turns every sign, of a family whose heads read before it."""
    model = model_that(-NEXT, final_norm=-1.0)
    assert model.mtp.undo_norm is not None
    figures, inspection = judged(model)
    assert [p.kind for p in inspection.problems] == ["trunk_hidden"]
    assert figures["trunk_hidden"]["other_acceptance"] == 1.0


def model_that_repeats() -> MTPCarrier:
    """A head that says again what it has just read, from the embedding: the token before the one it is to predict."""
    model = model_that(NEXT)
    with torch.no_grad():
        model.mtp.layers[0].proj.weight.copy_(torch.cat([0.001 * torch.randn(WORDS, WORDS), NEXT.T], dim=1))
    return model


@pytest.mark.parametrize("where", ["before", "after"])
def test_shifted_target(where: str) -> None:
    """Fault 1 in a trained head: the labels were rolled once too seldom or too often."""
    _, inspection = judged(model_that_repeats() if where == "before" else model_that(NEXT @ NEXT))
    assert [p.kind for p in inspection.problems] == ["shifted_target"]
    assert f"the token {where} the one" in inspection.problems[0].message


def test_recurrence_of_two_depths() -> None:
    """Depth 2 was trained on depth 1's hidden before its norm, which here turns every sign, and is handed the other."""
    model = model_that(NEXT, NEXT, final_norm=-1.0)
    model.mtp.recurrence = "post_norm"
    figures, inspection = judged(model)
    assert figures["recurrence"]["acceptance"]["pre_norm"] == 1.0
    assert "recurrence" in [p.kind for p in inspection.problems]
    assert next(p for p in inspection.problems if p.kind == "recurrence").message.startswith(
        "depth 2 does better on the pre_norm hidden of depth 1"
    )


def test_depth_2_takes_the_trunks_hidden_again() -> None:
    """Fault 14."""
    figures, inspection = judged(model_that(NEXT, NEXT @ NEXT))
    assert figures["recurrence"]["acceptance"] == {"post_norm": 0.0, "pre_norm": 0.0, "trunk": 1.0}
    kinds = [p.kind for p in inspection.problems]
    assert "recurrence" in kinds
    assert "the trunk's hidden again" in inspection.problems[kinds.index("recurrence")].message


def test_a_chain_that_is_right() -> None:
    figures, inspection = judged(model_that(NEXT, NEXT))
    assert inspection.healthy and [d["acceptance"] for d in figures["depths"]] == [1.0, 1.0]


def test_a_head_that_knows_nothing() -> None:
    _, inspection = judged(model_that(0.02 * torch.randn(WORDS, WORDS)))
    assert [p.kind for p in inspection.problems] in (["no_acceptance"], ["mtp_loss_above_uniform", "no_acceptance"])


def test_a_loss_above_a_uniform_guess() -> None:
    """Sure of the wrong word: worse than knowing nothing."""
    _, inspection = judged(model_that(torch.linalg.matrix_power(NEXT, 20)))
    assert [p.kind for p in inspection.problems] == ["mtp_loss_above_uniform", "no_acceptance"]


def test_shuffling_is_undone() -> None:
    model = model_that(NEXT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with shuffled(model):
        now = model.state_dict()
        changed = {name for name, tensor in before.items() if not torch.equal(tensor, now[name])}
        assert changed == {name for name in before if name.startswith("mtp.") and before[name].dim() > 1}
        assert all(torch.equal(before[n].flatten().sort()[0], now[n].flatten().sort()[0]) for n in changed)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


def test_constant_guess() -> None:
    row = Row(torch.zeros(1, 4), torch.zeros(1, 4, 2), torch.tensor([5, 2, 5, 5]))
    assert constant_guess([row]) == 0.75
    assert Scores().acceptance == Scores().mean_loss == 0.0


@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_family_runs(tmp_path: Path, name: str) -> None:
    """With a head of random numbers, whose loss is that of `mtp_forward`; the model is left as it was."""
    checkpoint(tmp_path, name)
    model = load(tmp_path)
    assert isinstance(model, MTPCarrier)
    before = {n: t.clone() for n, t in model.eval().state_dict().items()}
    ids = torch.randint(1, 61, (1, 24), generator=torch.Generator().manual_seed(1))
    rows = trunk_rows(model, [ids[0]])
    inspection = Inspection(str(tmp_path), name, name, 1, 1)
    figures = judge(model, rows, inspection)
    assert figures["depths"][0]["positions"] == 24 - 3 and math.isfinite(figures["depths"][0]["loss"])
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in before.items())
    stats = mtp_forward(
        model,
        rows[0].hidden_states,
        input_ids=ids,
        position_ids=torch.arange(24)[None],
        document_ids=torch.zeros_like(ids),
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
    ).stats.compute()
    assert score(model, rows, 1, "post_norm")[0].mean_loss == pytest.approx(stats["mtp/depth_1/loss"], rel=1e-5)


def with_tokenizer(model: MTPCarrier, path: Path) -> Path:
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def text_file(path: Path, words: int = 700) -> Path:
    path.write_text(" ".join(f"w{i % WORDS}" for i in range(words)))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def touched(model: MTPCarrier) -> MTPCarrier:
    """The known head with its other numbers off their first values, so that only its running is judged."""
    with torch.no_grad():
        for layer in model.mtp.layers:
            layer.embed_norm.weight.mul_(1.1)
    return model


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_tokenizer(touched(model_that(NEXT)), tmp_path / "model")
    text = text_file(tmp_path / "text.txt")
    code, out, _ = run(capsys, path, "--deep", "--text", text, "--json")
    found = json.loads(out)
    assert (code, found["healthy"], found["checked"]) == (0, True, ["headers", "values", "deep"]), found["problems"]
    assert found["deep"]["tokens"] == 700 and found["deep"]["text"] == str(text)
    assert found["deep"]["depths"][0]["acceptance"] == 1.0
    code, out, _ = run(capsys, path, "--deep", "--text", text)
    assert code == 0 and "1.000" in out and out.endswith("healthy\n")


def test_the_command_names_a_problem_and_its_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_tokenizer(touched(model_that_repeats()), tmp_path / "model")
    code, out, _ = run(capsys, path, "--deep", "--text", text_file(tmp_path / "text.txt"))
    (line,) = [line for line in out.splitlines() if line.startswith("problem")]
    assert code == 1 and line.startswith("problem (shifted_target): ") and "; mend: " in line


def test_what_cannot_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_tokenizer(touched(model_that(NEXT)), tmp_path / "model")
    (tmp_path / "short").write_text("w1 w2")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (("short", "too short"), ("empty", "is empty"), ("binary", "UTF-8"), ("none", "cannot read")):
        code, out, err = run(capsys, path, "--deep", "--text", tmp_path / name)
        assert code == 2 and out == "" and message in err and err.count("\n") == 1
    code, out, err = run(capsys, path, "--text", text_file(tmp_path / "text.txt"))
    assert code == 2 and "give --deep as well" in err
    for file in path.glob("token*"):
        file.unlink()
    code, out, err = run(capsys, path, "--deep", "--json")
    assert code == 2 and "tokenizer" in err and err.count("\n") == 1
    assert json.loads(out)["readable"] is False


def test_nothing_is_run_without_a_block_or_with_a_broken_one(tmp_path: Path) -> None:
    inspection = Inspection("here", "attached", "llama", 0, 0)
    look_deep(tmp_path, inspection, None)
    assert inspection.deep is None and "nothing to run" in inspection.notes[0]

    path = with_tokenizer(model_that(NEXT), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    for problems in (0, 1):
        inspection = Inspection(str(path), "attached", "llama", 2, 1)
        if problems:
            inspection.report("depth_mismatch", "known already", "mend")
        look_deep(path, inspection, text_file(tmp_path / "text.txt"))
        assert inspection.deep is None and "deep" not in inspection.checked
        assert [p.kind for p in inspection.problems] == (["depth_mismatch"] if problems else ["does_not_run"])


def test_rows(tmp_path: Path) -> None:
    path = with_tokenizer(model_that(NEXT), tmp_path / "model")
    text = text_file(tmp_path / "text.txt", words=20_000)
    rows = load_rows(path, read_texts(text))
    assert len(rows) == 16 and all(len(row) == ROW_LENGTH for row in rows)
    assert torch.equal(rows[1], torch.arange(ROW_LENGTH, 2 * ROW_LENGTH) % WORDS)
    assert len(read_texts(None)) > 4


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    path = with_tokenizer(model_that(NEXT), tmp_path / "model")
    file = path / "tokenizer.json"
    file.write_text(re.sub(r'"w5": ?5,', '"w5": 5000,', file.read_text()))
    inspection = Inspection(str(path), "attached", "llama", 1, 1)
    look_deep(path, inspection, text_file(tmp_path / "text.txt"))
    assert "ids that the embedding of 64 tokens lacks" in inspection.problems[0].message


def test_other_hidden_where_the_norm_cannot_be_undone() -> None:
    model = model_that(NEXT)
    model.mtp.undo_norm = None
    with torch.no_grad():
        model.model.norm.weight[3] = 0.0
    figures, _ = judged(model)
    assert figures["trunk_hidden"]["other_acceptance"] is None
