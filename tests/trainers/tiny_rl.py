"""A tiny task, an obvious rollout engine, and a trainer that takes any engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.config import RLConfig
from forerun.config_file import load_config
from forerun.data.prompts import Prompt
from forerun.engines.torch_engine import TorchEngine
from forerun.models.attach import attach
from forerun.models.carrier import load_named_weights
from forerun.rewards.protocol import RewardRequest, RewardResult
from forerun.rollout.protocol import Completion, Request, RolloutEngine
from forerun.trainers.rl import RLTrainer
from forerun.trainers.setup import engine_config
from tests.trainers.tiny import make_model, make_tokenizer

PROMPTS = [Prompt([{"role": "user", "content": f"say {word}"}], word, "tiny") for word in "abcd"]


class ShareOfWord:
    """Reward: the share of the answer's words that are the ground truth, out of four."""

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        return [RewardResult(r.response.split().count(str(r.ground_truth)) / 4) for r in requests]


class PlainRollout:
    """An obvious rollout engine: prompts of one length, the whole sequences recomputed for every token.

    It has no drafter, so it can say nothing about speculation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model).eval()
        self.weight_version = 0
        self.dtype = None

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        ids = torch.tensor([list(request.prompt_token_ids) for request in requests])
        done = [Completion(r.request_id, list(r.prompt_token_ids), [], [], [], "length", []) for r in requests]
        draws = [torch.Generator().manual_seed(request.sampling.seed or 0) for request in requests]
        for _ in range(requests[0].sampling.max_tokens):
            logits = self.model(input_ids=ids).logits[:, -1]
            chosen = []
            for row, request, out, draw in zip(logits, requests, done, draws, strict=True):
                scaled = (row / (request.sampling.temperature or 1.0)).log_softmax(-1)
                greedy = request.sampling.temperature == 0
                token = int(row.argmax() if greedy else torch.multinomial(scaled.exp(), 1, generator=draw))
                chosen.append(token)
                if out.finish_reason == "stop":
                    continue
                out.token_ids.append(token)
                out.weight_versions.append(self.weight_version)
                out.log_probs.append(float(scaled[token]))
                out.raw_log_probs.append(float(row.log_softmax(-1)[token]))
                if token in request.sampling.stop_token_ids:
                    out.finish_reason = "stop"
            ids = torch.cat([ids, torch.tensor(chosen)[:, None]], dim=1)
        return done

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        load_named_weights(self.model, dict(named_tensors))
        self.weight_version = version

    def drafter_digest(self) -> str:
        return "none"

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


def settings(tmp_path: Path, *more: str) -> RLConfig:
    return load_config(
        RLConfig,
        None,
        [
            "model.path=given",
            "data.train_files=[given]",
            f"trainer.output_dir={tmp_path / 'run'}",
            "trainer.logger=[jsonl]",
            "rollout.n=8",
            "rollout.max_response_length=4",
            "rollout.max_prompt_length=16",
            "train_batch_size=4",
            "ppo_mini_batch_size=4",
            "micro_batch_size=8",
            "optim.lr=1e-2",
            *more,
        ],
    )


MTP = ["mtp.enable=true", "mtp.enable_train=true", "mtp.detach_encoder=true", "mtp.mtp_loss_scaling_factor=1.0"]


def trainer(config: RLConfig, seed: int = 0, rollout: RolloutEngine | None = None, **objects: Any) -> RLTrainer:
    """A trainer on a tiny model of its own; `PlainRollout` unless another engine is given."""
    model = make_model(seed)
    if config.mtp.enable:
        model = attach(model, config.mtp, init=objects.pop("init", "plain"), seed=seed)
    engine = TorchEngine(model, engine_config(config.engine, config.optim, config.mtp, config.trainer.total_steps))
    return RLTrainer(
        config,
        prompts=objects.pop("prompts", PROMPTS),
        engine=engine,
        rollout=rollout if rollout is not None else PlainRollout(model),
        reward=objects.pop("reward", ShareOfWord()),
        tokenizer=make_tokenizer(),
        **objects,
    )


def weights(made: RLTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in made.engine.named_weights()}


def trunk(made: RLTrainer) -> dict[str, Tensor]:
    head = {name for name, _ in made.engine.drafter_weights()}
    return {name: tensor for name, tensor in weights(made).items() if name not in head}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
