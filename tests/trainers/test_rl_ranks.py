"""RL over 2 and 4 ranks (FSDP2, gloo) is RL in one process: responses, rewards, figures, weights, checkpoints."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import forerun
from forerun.cli import main
from forerun.config import RLConfig
from forerun.config_file import load_config
from forerun.data.prompts import Prompt
from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import ForerunError
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.mtp.config import MTPConfig
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Request, RolloutEngine, SamplingParams
from forerun.rollout.sglang.engine import SGLangEngine
from forerun.rollout.sync import digest
from forerun.rollout.vllm.buckets import write_buckets
from forerun.rollout.vllm.weights import ServedWeights
from forerun.trainers.ranked import RankedRollout
from forerun.trainers.rl import RLTrainer
from tests.logged import repeatable, repeatable_metrics
from tests.mtp.ranks import Ranks
from tests.planner.live import LiveBytes
from tests.rollout.sglang_server import SGLangServer, serving
from tests.trainers.tiny import make_model
from tests.trainers.tiny_rl import ShareOfWord

# Five prompts and responses in threes: neither divides over the ranks.
PROMPTS = [
    Prompt([{"role": "user", "content": f"say {'twice ' * (i % 2)}{w}"}], w, "tiny") for i, w in enumerate("abcde")
]


def settings(place: Path, *more: str) -> RLConfig:
    return load_config(
        RLConfig,
        None,
        [
            f"model.path={place / 'checkpoint'}",
            "data.train_files=[given]",
            f"trainer.output_dir={place / 'run'}",
            "trainer.logger=[jsonl]",
            "trainer.on_alarm=stop",
            "mtp={enable: true, enable_train: true, enable_rollout: true, num_speculative_tokens: 2}",
            "rollout={n: 4, max_response_length: 6, max_prompt_length: 16, deterministic: true, temperature: 0.8}",
            "train_batch_size=5",
            "ppo_mini_batch_size=5",
            "micro_batch_size=3",
            "optim.lr=1e-2",
            *more,
        ],
    )


JOINT, HEADS = ["mtp.mtp_loss_scaling_factor=0.5"], ["mtp.detach_encoder=true"]
KL = ["algorithm.use_kl_loss=true", "algorithm.use_kl_in_reward=true", "algorithm.kl_loss_coef=0.1"]
CASES = {
    "one depth, joint": (JOINT, 2, 1),
    "one depth, heads, two updates": ([*HEADS, "ppo_epochs=2"], 4, 1),
    "two depths, heads, KL, entropy": (["mtp.num_layers=2", *HEADS, *KL, "algorithm.entropy_coeff=0.1"], 2, 1),
    "two depths, joint, replicas, rows by tokens": (["mtp.num_layers=2", *JOINT, "ppo_max_token_len_per_gpu=44"], 4, 2),
}


def mesh_of(group: dist.ProcessGroup, replicas: int = 1) -> DeviceMesh:
    members = torch.arange(group.size())
    if replicas == 1:
        return DeviceMesh.from_group(group, "cpu", mesh=members.tolist())
    return DeviceMesh("cpu", members.view(replicas, -1), mesh_dim_names=("replicate", "shard"))


def trainer(config: RLConfig, mesh: DeviceMesh | None) -> RLTrainer:
    return RLTrainer(config, prompts=PROMPTS, eval_prompts=PROMPTS[:3], reward=ShareOfWord(), mesh=mesh)


def train(made: RLTrainer, steps: int = 2) -> dict[str, Any]:
    """All that a run shows: responses with what they earned, figures, weights."""
    reports, responses = [], []
    for _ in range(steps):
        reports.append(repeatable(made.step(PROMPTS)))
        responses.append([(s.completion.token_ids, s.reward.score, s.advantage) for s in made.samples])
    return {
        "responses": responses,
        "reports": [*reports, made.evaluate()],
        "weights": {name: tensor.clone() for name, tensor in made.engine.named_weights()},
    }


def rank_trains(group: dist.ProcessGroup, argument: tuple[RLConfig, int]) -> dict[str, Any]:
    config, replicas = argument
    digests: list[str] = []

    def noted(*arguments: Any) -> str:
        digests.append(digest(*arguments))
        return digests[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.trainers.rl.digest", noted)
        return train(trainer(config, mesh_of(group, replicas))) | {"digests": len(digests)}


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process_does(name: str, ranks: Ranks, place: Path) -> None:
    more, size, replicas = CASES[name]
    config = settings(place, *more)
    alone = train(trainer(config, None))
    assert len({tuple(tokens) for step in alone["responses"] for tokens, *_ in step}) > 20
    assert all(report["spec_num_accepted_tokens"] > 0 for report in alone["reports"][:-1])
    for rank, found in enumerate(ranks.run(rank_trains, [(config, replicas)] * size)):
        assert (found["digests"] > 0) == (rank == 0)  # the others do not hash the same bytes again
        assert [[r[:2] for r in step] for step in found["responses"]] == [
            [r[:2] for r in step] for step in alone["responses"]
        ]
        for step, expected in zip(found["responses"], alone["responses"], strict=True):
            assert [r[2] for r in step] == pytest.approx([r[2] for r in expected], rel=1e-4, abs=1e-5)
        for report, expected in zip(found["reports"], alone["reports"], strict=True):
            assert report == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert_close(found["weights"], alone["weights"])


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To float32 rounding, through AdamW."""
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4, msg=lambda m: f"{name}: {m}")  # noqa: B023


def rank_runs(group: dist.ProcessGroup, config: RLConfig) -> None:
    trainer(config, mesh_of(group)).train()


def assert_comes_out(run: Path, step: int) -> None:
    """The model of the last checkpoint is the one that the run has exported, file by file."""
    out = run.parent / f"step-{step}"
    assert main(["convert", str(run / f"checkpoint-{step}"), str(out), "--to", "hf"]) == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (run / "model").iterdir())
    for path in out.iterdir():
        assert path.read_bytes() == (run / "model" / path.name).read_bytes(), path


def test_a_run_goes_on_with_another_number_of_ranks(ranks: Ranks, place: Path) -> None:
    """Two ranks to step 2, four to step 3, one process to step 4."""
    common = [*HEADS, "trainer.save_freq=1", "trainer.test_freq=2", "algorithm.use_kl_loss=true"]
    steps = [*common, "trainer.total_steps=4"]
    trainer(settings(place, *steps, f"trainer.output_dir={place / 'whole'}"), None).train()
    for size, last in ((2, 2), (4, 3)):
        config = settings(place, *common, f"trainer.total_steps={last}")
        ranks.run(rank_runs, [config] * size)
    assert_comes_out(place / "run", 3)
    trainer(settings(place, *steps), None).train()
    assert_comes_out(place / "run", 4)
    found, expected = repeatable_metrics(place / "run"), repeatable_metrics(place / "whole")
    assert [line["step"] for line in found] == [line["step"] for line in expected] == [0, 1, 2, 3, 4]
    for line, other in zip(found, expected, strict=True):
        both = line.keys() & other.keys()  # a run that ends at step 3 looks at the held-out prompts there
        assert both == other.keys()
        assert {key: line[key] for key in both} == pytest.approx(other, rel=1e-3, abs=1e-5)
    samples = [[json.loads(line) for line in (place / run / "samples.jsonl").open()] for run in ("run", "whole")]
    assert [(line["step"], line["response"]) for line in samples[0]] == [
        (line["step"], line["response"]) for line in samples[1]
    ]
    exported = [dict(named_weights(forerun.load(place / run / "model"))) for run in ("run", "whole")]
    assert_close(*exported)


def native(seed: int) -> NativeEngine:
    mtp = MTPConfig(enable=True, enable_train=True, enable_rollout=True, num_layers=2)
    model = attach(make_model(seed), mtp, init="plain", seed=seed)
    return NativeEngine(model, num_speculative_tokens=2, products="linear", max_num_seqs=4)


def weights(seed: int) -> dict[str, Tensor]:
    mtp = MTPConfig(enable=True, enable_train=True, num_layers=2)
    return dict(named_weights(attach(make_model(seed), mtp, init="plain", seed=seed)))


def requests(count: int) -> list[Request]:
    """Three for each prompt."""
    return [
        Request(f"{i}-{j}", [2 + i, 3, 10], SamplingParams(max_tokens=3 + i, seed=10 * i + j))
        for i in range(count)
        for j in range(3)
    ]


def rank_rolls_out(group: dist.ProcessGroup, serving: list[int]) -> list[Any]:
    """Every rank says what it got, and what its own engine did for it."""
    ranks = RankGroup(mesh_of(group))
    own = native(seed=1) if ranks.rank in serving else None
    rollout = RankedRollout(ranks, own)
    finished: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if serving == [0]:  # its completions are broadcast: nobody gathers what the others have not
            patch.setattr(dist, "all_gather_object", None)
        said: list[Any] = [rollout.generate(requests(n), lambda c: finished.append(c.request_id)) for n in (5, 1)]
    rollout.update_weights(iter(weights(7).items()), 3)
    rollout.num_speculative_tokens = 1
    said += [rollout.generate(requests(5)), rollout.speculation_totals(), rollout.drafter_digest(), finished]
    own_drafts = 0 if own is None else own.speculation_totals().num_draft_tokens

    def broken() -> Iterator[tuple[str, Tensor]]:
        """Rank 0 gets one that its engine refuses, before the last ones have come."""
        for number, (name, tensor) in enumerate(weights(8).items()):
            dist.barrier(group)  # as a gather would: every rank takes every weight, or all hang
            yield name, (tensor[:1] if ranks.rank == serving[0] and number == 2 else tensor)

    with pytest.raises(ForerunError) as refused:
        rollout.update_weights(broken(), 4)
    said += [str(refused.value), rollout.weight_version]
    with pytest.raises(ForerunError, match="update the weights before generating"):
        rollout.generate(requests(1))
    if ranks.rank == serving[-1] and own is not None and len(serving) > 1:
        own.update_weights(weights(9).items(), 9)
    return [own_drafts, rollout.drafter_digest(), *said]


@pytest.mark.parametrize("serving", [[0, 1, 2, 3], [0], [1, 3]], ids=str)
def test_rollout_engines_answer_for_all_ranks(ranks: Ranks, serving: list[int]) -> None:
    alone = native(seed=1)
    expected: list[Any] = [alone.generate(requests(count)) for count in (5, 1)]
    alone.update_weights(weights(7).items(), 3)
    alone.num_speculative_tokens = 1
    expected += [alone.generate(requests(5)), alone.speculation_totals(), alone.drafter_digest()]
    found = ranks.run(rank_rolls_out, [serving] * 4)
    for rank, (drafts, last_digest, *said) in enumerate(found):
        assert (drafts > 0) == (rank in serving)
        for completions, others in zip(said[:3], expected[:3], strict=True):
            assert [c.request_id for c in completions] == [c.request_id for c in others]
            for completion, other in zip(completions, others, strict=True):
                assert completion.token_ids == other.token_ids and completion.weight_versions == other.weight_versions
                assert completion.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert said[3].num_draft_tokens == expected[3].num_draft_tokens
        assert said[3].accepted_per_depth == expected[3].accepted_per_depth
        assert said[4] == expected[4]
        assert said[5] == [r.request_id for count in (5, 1) for r in requests(count)]
        message, version = said[6:]
        assert ("rank" not in message) == (rank == serving[0]) and "shape" in message and "\n" not in message
        assert version == 3
        # One engine that was not updated, or updated apart, must not look like the trainer's.
        assert last_digest in {expected[4], "not the same on all ranks"}
        assert (last_digest == expected[4]) == (len(serving) == 1)


BUCKET = 100_000


def large() -> MTPCarrier:
    """1.7 MB of weights in float32, 66 kB the largest."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return attach(LlamaForCausalLM(config), MTPConfig(enable=True), init="plain", seed=1).eval()


def rank_syncs(group: dist.ProcessGroup, argument: tuple[str, Path]) -> dict[str, Any]:
    """Bytes of the most tensors alive during a sync, beyond the shards and the engine's own; and what arrived."""
    kind, path = argument
    torch.manual_seed(0)
    model = large()
    sizes = [tensor.nbytes for _, tensor in named_weights(model)]
    found: dict[str, Any] = {"sum": sum(sizes), "largest": max(sizes)}
    trainer = TorchEngine(model, TorchEngineConfig(), mesh=mesh_of(group))
    if kind == "vllm":
        served = ServedWeights(path)
        dtypes = served.sent_in(torch.bfloat16, [])
        with LiveBytes(model) as live:
            start = live._bytes()  # the shards
            plan = served.plan(trainer.named_weights(), dtypes)
            with tempfile.TemporaryDirectory() as directory:
                files = [file.stat().st_size for file in write_buckets(plan.tensors, Path(directory), BUCKET)]
        return found | {"extra": max(live.peaks.values()) - start, "files": files}
    if kind == "native":
        return found | synced(trainer, NativeEngine(large(), products="linear"))
    if group.rank() > 0:
        return found | synced(trainer, None)
    with serving(SGLangServer(large(), path)) as url:
        engine = SGLangEngine(url, bucket_bytes=BUCKET, timeout_s=60)
        try:
            return found | synced(trainer, engine)
        finally:
            engine.close()


def synced(trainer: TorchEngine, engine: RolloutEngine | None) -> dict[str, Any]:
    rollout = RankedRollout(trainer.ranks, engine)
    with LiveBytes(trainer.model) as live:
        if isinstance(engine, NativeEngine):
            for weight in engine.runner.weights.values():
                live._note(weight)
        start = live._bytes()
        rollout.update_weights(trainer.named_weights(), 3)
    expected = digest(trainer.drafter_weights())
    return {"extra": max(live.peaks.values()) - start, "arrived": rollout.drafter_digest() == expected}


@pytest.mark.parametrize("kind", ["native", "sglang", "vllm"])
def test_a_sync_holds_one_bucket_and_not_the_model(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    """Beside it a tensor or two: the shards that come together, the whole, its cast."""
    model = large()
    (model.bfloat16() if kind == "vllm" else model).save_pretrained(tmp_path)
    for rank, found in enumerate(ranks.run(rank_syncs, [(kind, tmp_path)] * 2)):
        bucket = BUCKET if kind == "vllm" or (kind == "sglang" and rank == 0) else 0
        assert found["extra"] <= bucket + 3 * found["largest"] < found["sum"] / 3, (rank, found)
        if kind == "vllm":
            assert len(found["files"]) > 5 and sum(found["files"]) < 0.55 * found["sum"]  # half the bytes in bfloat16
        else:
            assert found["arrived"]
