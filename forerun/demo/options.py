"""What a demo run is asked for, and how much of everything it does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from forerun.checkpoint.files import DEMO_MODEL


@dataclass(frozen=True)
class Sizes:
    """How much a demo does. Tokens are of prompts and responses together."""

    train_tokens: int
    held_out_tokens: int
    fit_tokens: int
    epochs: int
    lr: float
    rollout_prompts: int
    rollout_tokens: int
    draft_depths: tuple[int, ...]
    rl_steps: int
    rl_prompts: int
    rl_samples: int
    rl_tokens: int


FULL = Sizes(
    train_tokens=150_000,
    held_out_tokens=8_000,
    fit_tokens=40_000,
    epochs=3,
    lr=5e-4,
    rollout_prompts=8,
    rollout_tokens=96,
    draft_depths=(1, 2),
    rl_steps=5,
    rl_prompts=4,
    rl_samples=8,
    rl_tokens=32,
)
QUICK = Sizes(
    train_tokens=10_000,
    held_out_tokens=3_000,
    fit_tokens=8_000,
    epochs=2,
    # Few steps cannot make up for what large first ones would do to the fitted start.
    lr=5e-5,
    rollout_prompts=8,
    rollout_tokens=24,
    draft_depths=(1,),
    rl_steps=2,
    rl_prompts=2,
    rl_samples=4,
    rl_tokens=16,
)


@dataclass(frozen=True)
class DemoOptions:
    """Options of `forerun demo`.

    Attributes:
        quick: the same phases on fewer tokens.
        out: directory for everything the run writes; a second run there resumes.
        seed: of data order, initialisation and sampling.
        model: a Llama- or Qwen-like Hugging Face directory; None takes SmolLM2-135M-Instruct.
        head: which head rollout and RL draft with: the one trained in this run, or the one that ships with the package.
    """

    quick: bool = False
    out: Path = DEMO_MODEL.parent
    seed: int = 0
    model: Path | None = None
    head: Literal["fresh", "shipped"] = "fresh"

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one before."""
        return {
            "seed": self.seed,
            "head": self.head,
            "model": None if self.model is None else str(self.model.resolve()),
            "sizes": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.sizes).items()},
        }
