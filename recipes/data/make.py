"""Make the small data sets that the recipes run on: `python recipes/data/make.py [DIRECTORY]`.

Both come from reasoning-gym (Apache-2.0), whose items are generated from a seed: grade-school problems with a worked
solution for SFT, small sums and products for RL. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import reasoning_gym

from forerun.data.sources import load_source

SEED = 0


def sft_rows(count: int) -> Iterable[dict[str, Any]]:
    """Conversations: the problem, then its worked solution and the answer."""
    for item in reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=SEED):
        yield {
            "messages": [
                {"role": "user", "content": item["question"]},
                {"role": "assistant", "content": item["metadata"]["answer_cot"]},
            ]
        }


def rl_rows(count: int) -> Iterable[dict[str, Any]]:
    """Prompts in verl's columns; the settings are those of which SmolLM2-135M-Instruct gets some right and some not."""
    for prompt in load_source("arithmetic", "train", count, seed=SEED):
        yield {
            "data_source": prompt.data_source,
            "prompt": prompt.messages,
            "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
        }


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in (("sft.jsonl", sft_rows(96)), ("rl.jsonl", rl_rows(64))):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
