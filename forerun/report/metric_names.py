"""Every metric that a run logs: its unit, what it says, which way is better. docs/metrics.md is written from this."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Better = Literal["high", "low"]


class MetricName(NamedTuple):
    """One metric, or a family of them.

    Attributes:
        name: as logged; `{k}` stands for a depth and `{name}` for a word of the user's.
        unit: "" for a share or a ratio.
        meaning: one line.
        better: None where neither way is better as such.
    """

    name: str
    unit: str
    meaning: str
    better: Better | None = None


METRIC_NAMES: tuple[MetricName, ...] = (
    MetricName("reward_mean", "", "mean reward of all responses sampled in the step, penalties included", "high"),
    MetricName(
        "reward_best", "", "held-out prompts with several answers: the best of each prompt's, mean over prompts", "high"
    ),
    MetricName("reward_std", "", "standard deviation of those rewards"),
    MetricName("reward_max", "", "largest of them", "high"),
    MetricName("reward_min", "", "smallest of them", "high"),
    MetricName(
        "reward_events", "responses", "responses whose reward failed (exception, time limit) and counts as 0", "low"
    ),
    MetricName("reward/{name}", "", "mean of a further field that the reward function returned", "high"),
    MetricName("reward_kl_penalty", "nats/token", "mean KL per token that was taken from the rewards"),
    MetricName("overlong_penalty_mean", "", "mean of DAPO's penalty on nearly overlong responses", "high"),
    MetricName(
        "informative_groups", "", "share of prompts whose responses differ in reward: others teach nothing", "high"
    ),
    MetricName("num_gen_batches", "batches", "generation batches that dynamic sampling drew for the step", "low"),
    MetricName("kept_groups", "", "share of sampled prompts that dynamic sampling kept", "high"),
    MetricName("response_length_mean", "tokens", "mean length of a response"),
    MetricName("response_length_max", "tokens", "longest response"),
    MetricName("response_clip_ratio", "", "share of responses that the length limit cut off", "low"),
    MetricName(
        "acceptance_length", "tokens/step", "tokens per verify step of the rollout: 1 + accepted / steps", "high"
    ),
    MetricName("acceptance_rate", "", "accepted drafts / drafts, all depths together", "high"),
    MetricName("acceptance/depth_{k}", "", "accepted drafts / drafts judged at depth k", "high"),
    MetricName("spec_num_draft_tokens", "tokens", "drafts that were judged"),
    MetricName("spec_num_accepted_tokens", "tokens", "drafts that were accepted"),
    MetricName("spec_num_verify_steps", "steps", "forwards that judged at least one draft of a response"),
    MetricName(
        "drafter_in_sync", "", "1 if the rollout engine's drafter has the trainer's weights after the update", "high"
    ),
    MetricName("loss", "", "main loss: mean cross-entropy in nats (SFT), policy objective (RL)"),
    MetricName("pg_loss", "", "policy objective without the terms of KL and entropy"),
    MetricName("kl_loss", "nats", "KL to the reference policy, before its coefficient"),
    MetricName("entropy_loss", "nats", "entropy aggregated as the loss is, before entropy_coeff"),
    MetricName("mtp_loss", "", "MTP loss as it joins the main loss: mean over depths, times its factor", "low"),
    MetricName("mtp/depth_{k}/loss", "nats", "MTP loss of depth k, unscaled (1 - overlap for the loss tv)", "low"),
    MetricName("mtp/depth_{k}/label_top1", "", "positions whose first choice at depth k is the data's token", "high"),
    MetricName("mtp/depth_{k}/trunk_top1", "", "positions whose first choice at depth k is the trunk's own", "high"),
    MetricName(
        "mtp/depth_{k}/expected_acceptance",
        "",
        "overlap of depth k with the trunk's distribution, sum of min(p, q)",
        "high",
    ),
    MetricName(
        "mtp/acceptance_length", "tokens/step", "acceptance length of greedy drafting on the training text", "high"
    ),
    MetricName("mtp/grad_norm", "", "the block's gradient norm before clipping (Hugging Face callback)"),
    MetricName("entropy", "nats/token", "mean entropy of the policy at the tokens trained on"),
    MetricName("target_count", "tokens", "tokens that the main loss was trained on"),
    MetricName(
        "log_prob_gap_mean", "nats", "mean |log p of the trainer - log p of the rollout| per sampled token", "low"
    ),
    MetricName("log_prob_gap_max", "nats", "largest such gap", "low"),
    MetricName("rollout_kl", "nats", "KL(rollout || trainer) per token, k3 estimate", "low"),
    MetricName("ppo_kl", "nats", "KL(old || new) per token, k1 estimate"),
    MetricName("pg_clipfrac", "", "share of tokens at the clip bound"),
    MetricName("pg_clipfrac_lower", "", "share of tokens at the dual-clip bound"),
    MetricName("ratio_mean", "", "mean probability ratio new / old"),
    MetricName("rollout_rs_masked_fraction", "", "share of tokens that rejection sampling left out", "low"),
    MetricName(
        "staleness_mean", "steps", "steps trained since the weights that sampled a token, mean over tokens", "low"
    ),
    MetricName("staleness_max", "steps", "largest such number"),
    MetricName("partial_rollout_fraction", "", "share of responses that several versions of the weights wrote"),
    MetricName("queue_depth", "groups", "groups that were ready for later steps when the step began to train"),
    MetricName("rollout_workers", "workers", "rollout workers that are there", "high"),
    MetricName("requests_reissued", "requests", "requests so far that a lost worker held, and another one got", "low"),
    MetricName("grad_norm", "", "the trunk's gradient norm before clipping"),
    MetricName("mtp_grad_norm", "", "the MTP block's gradient norm before clipping"),
    MetricName("lr", "", "learning rate of the trunk"),
    MetricName("mtp_lr", "", "learning rate of the MTP block"),
    MetricName("skipped", "steps", "1 if a gradient that was not finite made the step be skipped", "low"),
    MetricName("epoch", "epochs", "passes over the data so far"),
    MetricName(
        "time/rollout", "s", "generating responses; asynchronous: time in which rollout workers had requests", "low"
    ),
    MetricName("time/rollout_idle", "s", "asynchronous: time in which they had none, mean over workers", "low"),
    MetricName("time/trainer_idle", "s", "asynchronous: the trainer waiting for the step's samples", "low"),
    MetricName("time/drain", "s", "asynchronous: waiting until no response is under way, before an update", "low"),
    MetricName("time/reward", "s", "judging them", "low"),
    MetricName("time/train", "s", "forward, backward and optimizer", "low"),
    MetricName("time/sync", "s", "handing weights to the rollout engine", "low"),
    MetricName("time/step", "s", "the whole step", "low"),
    MetricName(
        "rollout_tokens_per_second", "tokens/s", "new tokens / time/rollout (asynchronous: / time/step)", "high"
    ),
    MetricName("tokens_per_second", "tokens/s", "tokens of the step, prompts included / time/step", "high"),
)

_WILD = {"{k}": r"\d+", "{name}": r".+"}


def _pattern(name: str) -> re.Pattern[str]:
    text = re.escape(name)
    for wild, pattern in _WILD.items():
        text = text.replace(re.escape(wild), pattern)
    return re.compile(text)


_PATTERNS = [(_pattern(metric.name), metric) for metric in METRIC_NAMES]


def describe(name: str) -> MetricName | None:
    """What a logged metric is; figures of a held-out set, `SET/NAME`, are those of NAME. None if it is not ours."""
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    held_out, slash, inner = name.partition("/")
    found = describe(inner) if slash else None
    if found is None:
        return None
    # Held out, the main loss is a cross-entropy and is not trained on.
    better = "low" if found.name == "loss" else found.better
    return found._replace(meaning=f"{found.meaning}; held out, on {held_out}", better=better)


def markdown_table() -> str:
    """The table of docs/metrics.md."""
    arrows = {"high": "higher", "low": "lower", None: ""}
    rows = [
        f"| `{m.name}` | {m.unit} | {m.meaning.replace('|', chr(92) + '|')} | {arrows[m.better]} |"
        for m in METRIC_NAMES
    ]
    return "\n".join(["| metric | unit | what it says | better |", "|---|---|---|---|", *rows]) + "\n"
