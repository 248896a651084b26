"""Does RL learn, and what does MTP change about it? Four set-ups, four head losses, drafting on and off; JSON lines.

    python benchmarks/rl_learning.py [--seeds 5] [--steps 60] [--out DIR]

A character-level Llama of 0.9 M parameters and its MTP block learn by SFT to spell a word backward (reasoning-gym's
spell_backward), from data in which two of three answers repeat the word instead. GRPO then rewards the word backward.
Each arm is a run of `RLTrainer` on the native engine in deterministic mode; arms of one seed see the same prompts and
the same random numbers.

One line for each arm and seed: reward, main loss, gradient norm and acceptance over the steps, and the final policy's
hash. The last lines compare: whose policies are equal to the bit, and by how much rewards differ from those without
MTP. Exits with 1 if an arm that must leave the policy alone did not.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from reasoning_gym import create_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from forerun.config import RLConfig, SFTConfig
from forerun.config_file import load_config
from forerun.rollout.sync import digest
from forerun.trainers.rl import RLTrainer
from forerun.trainers.sft import SFTTrainer

TASK = "spell_backward"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
HEADS = ("mtp.enable_train=true", "mtp.detach_encoder=true", "mtp.mtp_loss_scaling_factor=1.0")
DRAFTING = ("mtp.enable_rollout=true", "mtp.num_speculative_tokens=2")
# What verl's guide calls set-ups: no MTP parameters, kept untrained, trained at scale 0, detached, joint.
ARMS: dict[str, tuple[str, ...]] = {
    "none": ("mtp.enable=false",),
    "keep": (),
    "scale 0": ("mtp.enable_train=true", "mtp.mtp_loss_scaling_factor=0"),
    "detached": HEADS,
    "joint": ("mtp.enable_train=true",),
    "joint, scale 1": ("mtp.enable_train=true", "mtp.mtp_loss_scaling_factor=1.0"),
    "frozen, drafting": DRAFTING,
    "ce, drafting": (*HEADS, *DRAFTING),
    "soft_ce, drafting": (*HEADS, *DRAFTING, "mtp.loss=soft_ce"),
    "tv, drafting": (*HEADS, *DRAFTING, "mtp.loss=tv"),
    "soft_ce, drafting by match": (*HEADS, *DRAFTING, "mtp.loss=soft_ce", "mtp.acceptance=match"),
}
# Arms whose policy has to be the one of "none", to the bit.
SAME_POLICY = ("keep", "scale 0", "detached", "soft_ce, drafting by match")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--arms", help="their names between semicolons; default is all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, help="keeps the runs, for `forerun report`; default is a temporary directory"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("forerun").setLevel(logging.ERROR)
    arms = list(ARMS) if args.arms is None else [arm.strip() for arm in args.arms.split(";")]
    with TemporaryDirectory(prefix="forerun-learning-") as scratch:
        out = args.out or Path(scratch)
        start = pretrain(out, args.sft_steps)
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for seed in range(args.seeds):
            for arm in arms:
                run = train(out, start, arm, seed, args.steps)
                runs[arm].append(run)
                print(json.dumps({"arm": arm, "seed": seed, **run}), flush=True)
    return compare(runs)


def words(seed: int, size: int) -> list[dict[str, Any]]:
    made = create_dataset(TASK, seed=seed, size=size, min_word_len=4, max_word_len=10)
    return [dict(made[index]) for index in range(size)]


def pretrain(out: Path, steps: int) -> Path:
    """A policy that is right a third of the time, and its MTP block, as a Hugging Face directory."""
    out.mkdir(parents=True, exist_ok=True)
    done = out / "sft" / "model"
    if done.exists():
        return done
    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<eos>", "<pad>", "<user>", *LETTERS])}, "<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<eos>", "<pad>", "<user>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}<user>{% else %}"
        "{% generation %}{{ m.content }}<eos>{% endgeneration %}{% endif %}{% endfor %}"
    )
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(out / "random")
    tokenizer.save_pretrained(out / "random")
    data = out / "sft.jsonl"
    rows = []
    for index, word in enumerate(words(1, 20_000)):
        asked, answer = word["metadata"]["word"].lower(), word["answer"].lower()
        rows.append({"prompt": asked, "response": answer if index % 3 == 0 else asked})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"model.path={out / 'random'}",
        f"data.train_files=[{data}]",
        "data.max_length=256",
        "mtp.enable=true",
        "mtp.enable_train=true",
        "mtp.loss=soft_ce",
        "mtp.detach_encoder=true",
        "mtp.mtp_loss_scaling_factor=1.0",
        "mtp_init=plain",
        "optim.lr=2e-3",
        "optim.warmup_steps=20",
        "optim.lr_scheduler_type=cosine",
        "train_batch_size=8",
        "micro_batch_size=8",
        f"trainer.total_steps={steps}",
        f"trainer.output_dir={out / 'sft'}",
        "trainer.logger=[jsonl]",
    ]
    SFTTrainer(load_config(SFTConfig, None, overrides)).train()
    return done


def train(out: Path, start: Path, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """One GRPO run; its figures."""
    data, batch = out / f"rl-{seed}.jsonl", 16
    rows = [
        {
            "prompt": word["metadata"]["word"].lower(),
            "reward_model": {"ground_truth": word["answer"].lower()},
            "data_source": TASK,
        }
        for word in words(100 + seed, steps * batch)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = out / f"rl {arm} {seed}"
    overrides = [
        f"model.path={start}",
        f"data.train_files=[{data}]",
        "mtp.enable=true",
        "reward.function=exact_match",
        "rollout.n=8",
        "rollout.max_prompt_length=16",
        "rollout.max_response_length=14",
        "rollout.max_num_seqs=128",
        "rollout.deterministic=true",
        f"train_batch_size={batch}",
        f"ppo_mini_batch_size={batch}",
        "micro_batch_size=128",
        "optim.lr=2e-4",
        "optim.mtp_lr=5e-4",
        f"trainer.total_steps={steps}",
        f"trainer.output_dir={run}",
        f"trainer.seed={seed}",
        "trainer.logger=[jsonl]",
        *ARMS[arm],
    ]
    trainer = RLTrainer(load_config(RLConfig, None, overrides))
    trainer.train()
    drafter = {name for name, _ in trainer.engine.drafter_weights()}
    policy = digest((name, weight) for name, weight in trainer.engine.named_weights() if name not in drafter)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if row["step"] > 0]
    return {
        "policy": policy,
        "reward": [round(row["reward_mean"], 4) for row in logged],
        "loss": [round(row["loss"], 6) for row in logged],
        "grad_norm": [round(row["grad_norm"], 5) for row in logged],
        "acceptance_length": [row.get("acceptance_length") for row in logged],
        "mtp_loss": [row.get("mtp/depth_1/loss") for row in logged],
        "log_prob_gap_max": max(row["log_prob_gap_max"] for row in logged),
        "alarms": len(trainer.alarms.raised),
    }


def compare(runs: dict[str, list[dict[str, Any]]]) -> int:
    """Print what the arms have in common and what not; 1 if an arm of SAME_POLICY left the policy of "none"."""
    broken = False
    for arm, found in runs.items():
        line: dict[str, Any] = {
            "compare": arm,
            "seeds": len(found),
            "reward_first_5": _mean(run["reward"][:5] for run in found),
            "reward_last_10": _mean(run["reward"][-10:] for run in found),
            "grad_norm": _mean(run["grad_norm"] for run in found),
        }
        for name, part in (("first_5", slice(5)), ("last_10", slice(-10, None))):
            lengths = [[x for x in run["acceptance_length"][part] if x is not None] for run in found]
            line[f"acceptance_length_{name}"] = _mean(lengths) if all(lengths) else None
        if arm != "none" and "none" in runs:
            same = [run["policy"] == base["policy"] for run, base in zip(found, runs["none"], strict=True)]
            line["same_policy"] = f"{sum(same)} of {len(same)}"
            differences = [
                statistics.mean(run["reward"]) - statistics.mean(base["reward"])
                for run, base in zip(found, runs["none"], strict=True)
            ]
            line["reward_difference"] = round(statistics.mean(differences), 4)
            if len(differences) > 1:
                line["standard_error"] = round(statistics.stdev(differences) / len(differences) ** 0.5, 4)
            broken |= arm in SAME_POLICY and not all(same)
        print(json.dumps(line), flush=True)
    return int(broken)


def _mean(parts: Iterable[Sequence[float]]) -> float:
    """Mean over runs of the mean over steps."""
    return round(statistics.mean(statistics.mean(part) for part in parts), 4)


if __name__ == "__main__":
    sys.exit(main())
