"""The distribution that is sampled equals transformers' own logits processors; samples never fall off the end."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from forerun.speculative.sampling import sample, target_distribution

V = 40


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 1.0])
def test_processing_equals_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(3, 2, V, dtype=torch.float64)
    expected = TemperatureLogitsWarper(temperature)(None, logits.flatten(0, 1))
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    ours = target_distribution(
        logits, torch.full((3,), temperature), torch.full((3,), top_k), torch.full((3,), top_p, dtype=torch.float64)
    )
    # A float32 temperature is not the float64 one; its rounding is what is left.
    torch.testing.assert_close(ours.flatten(0, 1), expected.softmax(-1), rtol=1e-6, atol=1e-9)


def test_rows_keep_their_own_settings() -> None:
    logits = torch.randn(4, 2, V)
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0])
    top_k = torch.tensor([0, 3, 0, 5])
    top_p = torch.tensor([1.0, 1.0, 0.7, 0.9])
    together = target_distribution(logits, temperature, top_k, top_p)
    for row in range(4):
        one = slice(row, row + 1)
        alone = target_distribution(logits[one], temperature[one], top_k[one], top_p[one])
        torch.testing.assert_close(together[one], alone)
    assert (together[0].max(-1).values == 1).all()
    assert torch.equal(together[0].argmax(-1), logits[0].argmax(-1))
    assert (together[1] > 0).sum(-1).tolist() == [3, 3]


def test_sample_takes_the_interval_of_the_uniform_number() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.2, 0.25, 0.7, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert sample(probs.expand(6, -1), uniforms).tolist() == [1, 1, 3, 3, 4, 4]


def test_sample_stays_inside_for_sums_that_round() -> None:
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        probs = torch.rand(1, 33, generator=generator) * 10 ** (seed % 7 - 3)
        probs[:, -3:] = 0
        assert int(sample(probs, torch.tensor([1 - 2**-53], dtype=torch.float64))) == 29
