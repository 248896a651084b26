"""Where a demo run keeps its things, and which of its phases are done."""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedTokenizerBase

from forerun.config import ModelConfig
from forerun.data.gguf import smollm2
from forerun.demo import self_text
from forerun.demo.options import DemoOptions
from forerun.demo.self_text import Response
from forerun.errors import UsageError
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier, load_named_weights, named_weights
from forerun.models.loading import load
from forerun.mtp.config import MTPConfig
from forerun.report.atomic import write_text
from forerun.report.summary import Summary
from forerun.trainers.setup import load_tokenizer

STATE = "phases.json"
SHIPPED_HEAD = "smollm2_head.safetensors"
# The other models' own text: what their engine writes in a few minutes.
OWN_TEXT_TOKENS = {False: 60_000, True: 8_000}


def mtp_config() -> MTPConfig:
    """The head learns the trunk's own distribution and nothing but the head learns from it."""
    return MTPConfig(
        enable=True,
        enable_train=True,
        enable_rollout=True,
        detach_encoder=True,
        mtp_loss_scaling_factor=1.0,
        loss="soft_ce",
    )


def load_shipped_head(model: MTPCarrier) -> None:
    """Put the head that ships with the package into a freshly attached SmolLM2.

    Raises:
        ForerunError: the file does not hold exactly the block's tensors.
    """
    with resources.as_file(resources.files("forerun.demo").joinpath(SHIPPED_HEAD)) as path:
        shipped = load_file(path)
    weights = {name: tensor for name, tensor in named_weights(model) if name not in shipped}
    load_named_weights(model, weights | shipped)


class Workspace:
    """One output directory.

    Raises:
        UsageError: the directory holds a run with other options, or is a file.
    """

    def __init__(self, options: DemoOptions) -> None:
        if options.head == "shipped" and options.model is not None:
            raise UsageError(
                "--head shipped is a head for SmolLM2-135M-Instruct: leave --model out, or use --head fresh"
            )
        self.options = options
        self.sizes = options.sizes
        self.out = options.out
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out} is a file: name a directory")
        self._state = {"options": options.fingerprint(), "done": []}
        if (state := self.out / STATE).exists():
            self._resume(state)
        self.summary = Summary(self.out, seeds={"seed": options.seed})

    def _resume(self, state: Path) -> None:
        try:
            earlier = json.loads(state.read_text())
            options, _ = earlier["options"], earlier["done"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{state} cannot be read: delete {self.out} to start anew") from None
        if options != self._state["options"]:
            changed = ", ".join(k for k, v in self.options.fingerprint().items() if options.get(k) != v)
            raise UsageError(f"{self.out} holds a run with other options ({changed}): use another --out or delete it")
        self._state = earlier

    def is_done(self, phase: str) -> bool:
        return phase in self._state["done"]

    def mark_done(self, phase: str) -> None:
        self._state["done"] = [*self._state["done"], phase]
        write_text(self.out / STATE, json.dumps(self._state, indent=2) + "\n")

    def tidy(self, phase: str) -> None:
        """Delete what only a resume of `phase` would have needed: half a gigabyte each."""
        for checkpoint in (self.out / phase).glob("checkpoint-*"):
            shutil.rmtree(checkpoint)

    @cached_property
    def model_dir(self) -> Path:
        """The trunk's checkpoint."""
        return self.options.model or smollm2(report=print)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(ModelConfig(path=str(self.model_dir)))

    @property
    def sft_model(self) -> Path:
        return self.out / "sft" / "model"

    @property
    def rl_model(self) -> Path:
        return self.out / "rl" / "model"

    @property
    def exported_model(self) -> Path:
        return self.out / "model"

    def attached_model(self) -> MTPCarrier:
        """The trunk with a block that starts as its projection alone, or with its own block where it has one."""
        model = load(self.model_dir)
        if isinstance(model, MTPCarrier):
            model.mtp_config = mtp_config()
            return model
        return attach(model, mtp_config(), seed=self.options.seed)

    def trained_model(self, path: Path) -> MTPCarrier:
        """A checkpoint that a phase of this run exported, set up for training and drafting."""
        model = load(path)
        assert isinstance(model, MTPCarrier)
        model.mtp_config = mtp_config()
        return model

    def drafting_model(self) -> MTPCarrier:
        """The trunk with the head that rollouts draft with: this run's, or the shipped one."""
        if self.options.head == "shipped":
            model = self.attached_model()
            load_shipped_head(model)
            return model
        return self.trained_model(self.sft_model)

    @cached_property
    def responses(self) -> list[Response]:
        """The trunk's own text: packaged for SmolLM2, written once for another model."""
        if self.options.model is None:
            return self_text.packaged()
        path = self.out / "text.jsonl.gz"
        if path.exists():
            return self_text.read(path)
        model = load(self.model_dir)
        tokens = OWN_TEXT_TOKENS[self.options.quick]
        return self_text.write(model, self.tokenizer, path, self.options.seed, tokens)

    @cached_property
    def train_text(self) -> list[Response]:
        return self_text.take(self.responses, "train", self.sizes.train_tokens)

    @cached_property
    def held_out_text(self) -> list[Response]:
        return self_text.take(self.responses, "held_out", self.sizes.held_out_tokens)

    @cached_property
    def draft_vocabulary(self) -> torch.Tensor:
        config = AutoConfig.from_pretrained(self.model_dir).get_text_config()
        return self_text.draft_vocabulary(self.train_text, config.vocab_size)
