"""From a Hugging Face model to a runner that gives its logits, which is tried on a few tokens before it is used."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import is_flash_attention_requested

from forerun.errors import ForerunError, UsageError, one_line
from forerun.rollout.native.copying import ModelCopy, kinds_for
from forerun.rollout.native.model import ModelRunner
from forerun.rollout.native.products import Choice, ProductTable

_TOKENS = 12
# Largest difference to the model's own logits that rounding explains, relative to their standard deviation.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.05}
_PRECISE = (torch.float64, torch.float32)


@torch.no_grad()
def fit_runner(
    model: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    draft_vocabulary: Tensor | None,
    products: Choice,
) -> ModelRunner:
    """Copy a model: into the engine's own layers where these compute it, else into copies of transformers' modules.

    Args:
        model: the Hugging Face model; not kept.
        dtype: of the copy.
        device: of the copy.
        draft_vocabulary: token ids to which drafting is restricted; None is all.
        products: how small matrix products are chosen, see `native.products`.

    Raises:
        UsageError: the model is of a kind that the engine does not run.
        ForerunError: the copy does not give the model's own logits.
    """
    kinds = kinds_for(model)
    tokens, expected = _own_logits(model)
    error = float("inf")
    for kind in kinds:
        runner = None  # the copy before goes before another is made
        try:
            runner = ModelRunner(model, ModelCopy(model, kind, dtype, device, ProductTable(products)), draft_vocabulary)
            error = logit_error(runner, tokens, expected)
            if error <= _TOLERANCE[dtype]:
                return runner
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as unfit:
            if kind is kinds[-1]:
                raise UsageError(
                    f"the native engine cannot run {type(model).__name__} over its cache ({one_line(unfit)}): "
                    "use another rollout backend"
                ) from unfit
    raise ForerunError(
        f"the native engine's logits differ from {type(model).__name__}'s by {error:.2g} standard deviations: "
        "it does not compute this model; use another rollout backend"
    )


def _own_logits(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """A few tokens, long [N], and the model's logits for them, float64 [N, V]."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    tokens = torch.randint(vocab_size, (_TOKENS,), generator=generator)
    training, attention = model.training, model.config._attn_implementation
    try:
        model.eval()
        if is_flash_attention_requested(model.config):  # which takes no float32, in which a model may be held
            model.config._attn_implementation = "sdpa"
        return tokens, model(tokens[None].to(model.device)).logits[0].to("cpu", torch.float64)
    finally:
        model.train(training)
        model.config._attn_implementation = attention


def logit_error(runner: ModelRunner, tokens: Tensor, expected: Tensor) -> float:
    """The largest difference of logits, in standard deviations, over all that a text goes through.

    A prompt in two pieces, a second row copied from it, steps that verify right and wrong drafts, rows of unequal
    length. A layer that remembers in a way of its own differs here, if not in the prompt's forward.

    Args:
        runner: its caches are released in the end.
        tokens: long [12].
        expected: float64 [12, V].
    """
    device, count = runner.device, len(tokens)
    wrong = ((tokens + 1) % runner.vocab_size).tolist()
    right = tokens.tolist()
    after = [*right[1:], 0]
    errors: list[Tensor] = []

    def compare(hidden_states: Tensor, positions: list[int]) -> None:
        difference = runner.head(hidden_states).to("cpu", torch.float64) - expected[positions]
        errors.append(difference.abs().amax(dim=-1))

    def prefill(start: int, stop: int) -> None:
        following = torch.tensor([after[start:stop]], device=device) if runner.block is not None else None
        pieces = [(0, start, stop - start)]
        compare(runner.prefill(tokens[None, start:stop].to(device), following, pieces)[0], list(range(start, stop)))

    def decode(texts: list[list[int]], starts: list[int], kept: list[int]) -> None:
        new = len(texts[0])
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
        hidden_states = runner.decode(
            torch.tensor(texts, device=device), positions, max(starts) + new, len(set(starts)) == 1
        )
        runner.commit(kept)
        for row, (start, keep) in enumerate(zip(starts, kept, strict=True)):
            compare(hidden_states[row, :keep], list(range(start, start + keep)))

    runner.allocate(2, count + 2)
    prefill(0, 5)
    prefill(5, 7)
    runner.copy_row(0, 1, 7)
    decode([[right[7], wrong[8], wrong[9]], [right[7], right[8], wrong[9]]], [7, 7], [1, 2])
    decode([right[8:10], right[9:11]], [8, 9], [2, 2])
    decode([[right[10]], [right[11]]], [10, 11], [1, 1])
    assert runner.cache is not None
    runner.shapes = runner.cache.shapes
    runner.release()
    worst = torch.cat(errors)
    # In low precision a router's near tie may fall the other way for a few tokens; a wrong computation hits most.
    error = worst.max() if runner.dtype in _PRECISE else worst.median()
    return (error / expected.std().clamp(min=1e-30)).item()
