"""The vLLM engine's parts that need no vLLM: which weight goes where, and which drafts belong to a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.models.weight_stream import WeightStream
from forerun.rollout.vllm.completion import Judged, accepted_draft, judged
from forerun.rollout.vllm.connection import Finished
from forerun.rollout.vllm.launch import LaunchSettings, engine_arguments
from forerun.rollout.vllm.weights import ServedWeights
from tests.oracles import served_models
from tests.oracles.test_vllm import save
from tests.rollout.conformance.vllm import attached, exported


def served(name: str, folder: Path) -> tuple[MTPCarrier, Path]:
    if name == "attached":
        model = attached()
        return model, exported(model, folder)
    model = served_models.mixed(name)
    save(model, folder / name)
    return model, folder / name


@pytest.mark.parametrize("name", ["attached", "mimo", "glm4_moe", "qwen3_next"])
def test_an_update_is_what_the_served_files_hold(name: str, tmp_path: Path) -> None:
    model, path = served(name, tmp_path)
    weights = ServedWeights(path)
    plan = weights.plan(WeightStream.of(named_weights(model)))
    sent = list(plan.tensors)
    planned, parts = dict(sent), [weights.is_drafter(name) for name, _ in sent]
    files = load_file(path / "model.safetensors")
    assert planned.keys() == files.keys() and len(planned) == len(sent)
    assert parts == sorted(parts) and {False, True} == set(parts)  # the trunk's first
    assert all(torch.equal(planned[name], tensor) for name, tensor in files.items())
    own = set(mtp_weight_names(model).values())
    layout = {name: shape for name, shape, _ in weights.drafter_layout(plan.biased)}
    assert layout == {name: tuple(tensor.shape) for name, tensor in named_weights(model) if name in own}
    assert all(sum(torch.Size(s).numel() for _, s in pieces) == torch.Size(shape).numel()
               for _, shape, pieces in weights.drafter_layout(plan.biased))  # fmt: skip


@pytest.mark.parametrize("change", ["missing", "misshapen", "unknown", "twice", "drafter"])
def test_a_plan_is_whole_or_refused(change: str, tmp_path: Path) -> None:
    model, path = served("mimo", tmp_path)
    given: list[tuple[str, Tensor]] = list(named_weights(model))
    name = "model.layers.1.mlp.down_proj.weight"
    if change == "missing":
        given = [pair for pair in given if pair[0] != name]
    elif change == "misshapen":
        given = [(n, t[:-1] if n == name else t) for n, t in given]
    elif change == "unknown":
        given.append(("else", torch.zeros(1)))
        name = "else"
    elif change == "twice":
        given.append((name, torch.zeros(1)))
    else:
        given = [pair for pair in given if ".mtp_layers." not in pair[0]]
        name = "drafter"
    with pytest.raises(ForerunError, match=name):
        ServedWeights(path).plan(WeightStream.of(given))


def test_weights_are_rounded_to_the_engines_dtype_on_the_way(tmp_path: Path) -> None:
    """But for those that the engine holds wider, as it says; where it fuses one of these, nobody knows, and none is."""
    model, path = served("glm4_moe", tmp_path)
    weights, given = ServedWeights(path), dict(named_weights(model))

    def sent(dtype: torch.dtype, *wider: str) -> dict[str, Tensor]:
        return dict(weights.plan(WeightStream.of(given.items()), weights.sent_in(dtype, wider)).tensors)

    wide = sent(torch.bfloat16, "model.layers.1.fused_gate.weight")
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert {tensor.dtype for tensor in sent(torch.float64).values()} == {torch.float32}  # never to a wider one
    for name, tensor in sent(torch.bfloat16, "model.layers.1.mlp.gate.weight").items():
        kept = name.endswith("mlp.gate.weight")
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(tensor, wide[name].to(tensor.dtype))
    assert sum(name.endswith("mlp.gate.weight") for name in wide) > 1


def test_a_drafter_that_is_not_there_is_sent_nothing(tmp_path: Path) -> None:
    model, path = served("glm4_moe", tmp_path)
    weights, given = ServedWeights(path), list(named_weights(model))
    trunk = [name for name, _ in weights.plan(WeightStream.of(given), drafts=False).tensors]
    assert sorted(trunk) == sorted(name for name in weights.shapes if not weights.is_drafter(name))


def test_a_drafter_that_comes_first_waits_for_the_trunk(tmp_path: Path) -> None:
    model, path = served("glm4_moe", tmp_path)
    weights, given = ServedWeights(path), list(named_weights(model))
    parts = [weights.is_drafter(n) for n, _ in weights.plan(WeightStream.of(reversed(given))).tensors]
    assert parts == sorted(parts) and len(parts) == len(weights.shapes)


def test_a_bias_that_is_not_zero_may_not_be_left_out(tmp_path: Path) -> None:
    model, path = served("mimo", tmp_path)
    given = [(n, t) for n, t in named_weights(model) if n != "model.layers.0.self_attn.q_proj.bias"]
    with pytest.raises(ForerunError, match="q_proj.bias"):  # noqa: RUF043 - any character will do
        ServedWeights(path).plan(WeightStream.of(given))


@pytest.mark.parametrize(
    ("accepted", "size", "kept", "beyond"),
    [
        ([2, 0, 1], 7, [2, 0, 1], [0, 0]),  # 1 + 3 + 1 + 2
        ([2, 0, 1], 6, [2, 0, 1], [0, 0]),  # the target's own token lay behind the end
        ([2, 0, 2], 6, [2, 0, 1], [0, 1]),
        ([0, 2], 3, [0, 1], [0, 1]),
        ([], 1, [], [0, 0]),
    ],
)
def test_drafts_behind_the_end_of_a_text_do_not_count(
    accepted: list[int], size: int, kept: list[int], beyond: list[int]
) -> None:
    finished = Finished(
        id="a",
        token_ids=[3] * size,
        log_probs=[0.0] * size,
        finish_reason="length",
        stop_reason=None,
        accepted=accepted,
        drafted=[2] * len(accepted),
    )
    assert judged(finished, 2) == (kept, [2] * len(accepted), beyond)


@pytest.mark.parametrize(
    ("accepted", "size", "flags"),
    [
        ([2, 0, 1], 7, "-++--+-"),
        ([2, 0, 1], 6, "-++--+"),  # the target's own token lay behind the end
        ([2, 0, 1], 8, None),  # a step without drafts, who knows where
        ([], 3, "---"),
    ],
)
def test_accepted_drafts_are_found_in_the_text(accepted: list[int], size: int, flags: str | None) -> None:
    counts = Judged(accepted, [2] * len(accepted), [0, 0])
    assert accepted_draft(counts, size) == (None if flags is None else [flag == "+" for flag in flags])


def test_what_cannot_be_launched_is_refused(tmp_path: Path) -> None:
    model, path = served("attached", tmp_path)
    assert engine_arguments(path, LaunchSettings("python"))["trust_remote_code"] is True
    with pytest.raises(UsageError, match="forerun convert"):
        engine_arguments(tmp_path / "attached", LaunchSettings("python"))
    (path / "configuration_mimo.py").write_text("print('not ours')\n")
    with pytest.raises(UsageError, match="trust_remote_code"):
        engine_arguments(path, LaunchSettings("python"))
    model.config.num_nextn_predict_layers = 0
    served_models.trunk_of("mimo").save_pretrained(tmp_path / "plain")
    with pytest.raises(UsageError, match="no MTP block"):
        engine_arguments(tmp_path / "plain", LaunchSettings("python"))
