"""The policy loss against a loop over tokens, and the gradient of a split batch against that of the whole."""

import math
from typing import get_args

import pytest
import torch

from forerun.algorithms import (
    LogProbGap,
    LossCounts,
    PolicyStats,
    aggregate_loss,
    count_targets,
    gspo_log_ratio,
    importance_weights,
    policy_loss,
    sequence_lengths,
)
from forerun.algorithms.aggregation import LossAggMode
from forerun.engines.accumulation import merge_metrics

ROWS, LENGTH = 6, 17


@pytest.fixture
def sample():
    """Rows of two or three packed documents with prompts, uneven lengths and padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.full((ROWS, LENGTH), -1)
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    document = 0
    for row in range(ROWS):
        start = 0
        for _ in range(2 + row % 2):
            length = int(torch.randint(2, 6, (), generator=generator))
            ids[row, start : start + length] = document
            prompt = int(torch.randint(1, length + 1, (), generator=generator))  # some answers are empty
            mask[row, start + prompt : start + length] = True
            start, document = start + length, document + 1
    log_probs, old, rollout = (-3 * torch.rand(3, ROWS, LENGTH, generator=generator, dtype=torch.float64)).unbind(0)
    advantages = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    return {"ids": ids, "mask": mask, "log_probs": log_probs, "old": old, "rollout": rollout, "advantages": advantages}


def slow_token_loss(new, old, advantage, low, high, c):
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * clipped)
    was_clipped = -advantage * clipped > -advantage * ratio
    if c is not None and advantage < 0:
        return min(loss, -advantage * c), was_clipped, loss > -advantage * c
    return loss, was_clipped, False


@pytest.mark.parametrize("c", [None, 1.5])
def test_equals_the_loop(sample, c):
    out = policy_loss(sample["log_probs"], sample["old"], sample["advantages"], sample["mask"], 0.2, 0.28, c)
    expected, clipped, lower, kl = torch.zeros(ROWS, LENGTH, dtype=torch.float64), 0, 0, 0.0
    for i in range(ROWS):
        for j in range(LENGTH):
            if sample["mask"][i, j]:
                new, old = float(sample["log_probs"][i, j]), float(sample["old"][i, j])
                loss, hit, hit_lower = slow_token_loss(new, old, float(sample["advantages"][i, j]), 0.2, 0.28, c)
                expected[i, j] = loss
                clipped, lower, kl = clipped + hit, lower + hit_lower, kl + old - new
    torch.testing.assert_close(out.losses, expected)
    assert clipped > 0 and (lower > 0) == (c is not None)
    assert (out.stats.clipped, out.stats.clipped_lower) == (clipped, lower)
    assert out.stats.sum_kl == pytest.approx(kl)
    assert out.stats.num_tokens == int(sample["mask"].sum())


def test_on_policy_gradient_is_minus_the_advantage(sample):
    log_probs = sample["log_probs"].clone().requires_grad_()
    out = policy_loss(log_probs, sample["log_probs"], sample["advantages"], sample["mask"])
    out.losses.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.where(sample["mask"], -sample["advantages"], 0.0))


def slow_aggregate(losses, mask, ids, mode, factor):
    sequences: dict[int, list[float]] = {}
    for i in range(ROWS):
        for j in range(LENGTH):
            if mask[i, j]:
                sequences.setdefault(int(ids[i, j]), []).append(float(losses[i, j]))
    sums, means = [sum(s) for s in sequences.values()], [sum(s) / len(s) for s in sequences.values()]
    return {
        "token-sum": sum(sums),
        "token-mean": sum(sums) / sum(len(s) for s in sequences.values()),
        "seq-mean-token-sum": sum(sums) / len(sums),
        "seq-mean-token-mean": sum(means) / len(means),
        "seq-mean-token-sum-norm": sum(sums) / len(sums) / factor,
    }[mode]


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_aggregation_equals_the_loop(sample, mode):
    losses, mask, ids = sample["advantages"], sample["mask"], sample["ids"]
    counts = count_targets(mask, ids)
    got = aggregate_loss(losses, mask, mode, counts, sequence_lengths(mask, ids), loss_scale_factor=7.0)
    assert float(got) == pytest.approx(slow_aggregate(losses, mask, ids, mode, 7.0), abs=1e-12)


@pytest.mark.parametrize("mode", get_args(LossAggMode))
@pytest.mark.parametrize("split", ["rows", "columns"])
def test_any_split_gives_the_gradient_of_the_whole(sample, mode, split):
    """Uneven micro-batches, and shards that cut sequences in two as context parallelism does."""
    lengths = sequence_lengths(sample["mask"], sample["ids"])
    counts = count_targets(sample["mask"], sample["ids"])
    if split == "rows":
        parts = [slice(0, 1), slice(1, 4), slice(4, ROWS)]
        assert sum((count_targets(sample["mask"][p], sample["ids"][p]) for p in parts), LossCounts()) == counts
    else:
        parts = [(slice(None), slice(0, 5)), (slice(None), slice(5, LENGTH))]

    def gradient(pieces):
        log_probs = sample["log_probs"].clone().requires_grad_()
        sums = {}
        for p in pieces:
            weights = importance_weights(sample["old"][p], sample["rollout"][p], sample["mask"][p], sample["ids"][p])
            out = policy_loss(
                log_probs[p], sample["old"][p], sample["advantages"][p], sample["mask"][p], importance_weights=weights
            )
            aggregate_loss(out.losses, sample["mask"][p], mode, counts, lengths[p], 7.0).backward()
            merge_metrics(sums, vars(out.stats))
        return log_probs.grad, PolicyStats(**sums)

    (whole, whole_stats), (parted, parted_stats) = gradient([slice(None)]), gradient(parts)
    assert whole.abs().sum() > 0
    torch.testing.assert_close(parted, whole, rtol=1e-12, atol=1e-15)
    assert parted_stats.compute() == pytest.approx(whole_stats.compute())


def test_what_stands_outside_the_mask_stays_outside(sample):
    mask = sample["mask"]
    spoiled = torch.where(mask, sample["log_probs"], float("nan")).requires_grad_()
    out = policy_loss(spoiled, sample["old"], sample["advantages"], mask)
    aggregate_loss(out.losses, mask, "token-mean", count_targets(mask, sample["ids"])).backward()
    assert torch.isfinite(spoiled.grad).all() and (spoiled.grad[~mask] == 0).all()


def test_gap(sample):
    trainer, rollout, mask = sample["old"], sample["rollout"], sample["mask"]
    differences = [float(trainer[i, j] - rollout[i, j]) for i in range(ROWS) for j in range(LENGTH) if mask[i, j]]
    sums = {}
    for p in (slice(0, 2), slice(2, ROWS)):
        merge_metrics(sums, vars(LogProbGap.measure(trainer[p], rollout[p], mask[p])))
    merged = LogProbGap(**sums).compute()
    assert merged["log_prob_gap_mean"] == pytest.approx(sum(map(abs, differences)) / len(differences))
    assert merged["log_prob_gap_max"] == pytest.approx(max(map(abs, differences)))
    assert merged["rollout_kl"] == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / len(differences))
    assert LogProbGap().compute()["log_prob_gap_mean"] is None


def test_gspo_gives_every_token_its_sequence_s_ratio_and_its_own_gradient(sample):
    """arXiv 2507.18071, equations 13 and 14: the value is the geometric mean, the gradient that of each log-prob."""
    ids, mask, old, advantages = (sample[name] for name in ("ids", "mask", "old", "advantages"))
    new = sample["log_probs"].clone().requires_grad_()
    out = policy_loss(new, old, advantages, mask, 0.2, 0.28, None, log_ratio=gspo_log_ratio(new, old, mask, ids))
    out.losses.sum().backward()
    clipped = 0
    for i in range(ROWS):
        for j in range(LENGTH):
            if not mask[i, j]:
                assert out.losses[i, j] == new.grad[i, j] == 0
                continue
            members = [k for k in range(LENGTH) if mask[i, k] and ids[i, k] == ids[i, j]]
            ratio = math.exp(sum(float(new[i, k] - old[i, k]) for k in members) / len(members))
            advantage = float(advantages[i, j])
            held = min(max(ratio, 0.8), 1.28)
            assert float(out.losses[i, j]) == pytest.approx(max(-advantage * ratio, -advantage * held))
            free = -advantage * ratio >= -advantage * held
            assert float(new.grad[i, j]) == pytest.approx(-advantage * ratio if free else 0.0)
            clipped += not free
    assert 0 < clipped < int(mask.sum())


def test_bad_input(sample):
    args = (sample["log_probs"], sample["old"], sample["advantages"], sample["mask"])
    with pytest.raises(ValueError, match="clip_ratio_low"):
        policy_loss(*args, clip_ratio_low=1.5)
    with pytest.raises(ValueError, match="clip_ratio_c"):
        policy_loss(*args, clip_ratio_c=0.5)
    with pytest.raises(ValueError, match="old_log_probs"):
        policy_loss(args[0], args[1][:2], args[2], args[3])
    with pytest.raises(ValueError, match="needs lengths"):
        aggregate_loss(args[2], args[3], "seq-mean-token-mean", LossCounts(1, 1))
    with pytest.raises(ValueError, match="token-mean, seq-mean"):
        aggregate_loss(args[2], args[3], "mean", LossCounts(1, 1))
