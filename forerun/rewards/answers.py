"""Rewards for answers that can be checked: final numbers and formulas, exact text, reasoning-gym tasks."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

Messages = list[dict[str, str]]

# A sign belongs to a number only where nothing stands before it: 5-3 has the numbers 5 and 3.
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+|[eE][-+]?\d+)?|(?:(?<![\w)])[-+])?(?<!\d)\.\d+"
)
_STATED = re.compile(r"(?:final\s+)?answer\s*(?:is|:|=)[:\s]*(.+)", re.IGNORECASE)


def exact_match(prompt: Messages, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 where the response is the ground truth, whitespace at both ends aside."""
    return float(response.strip() == _required(ground_truth).strip())


def math_answer(prompt: Messages, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """1 where the response's final answer equals the ground truth as mathematics, 0 where not or where it has none.

    Plain numbers are compared here, everything else by math-verify, whose own time limits are switched off: they are
    signals, which fail outside the main thread. Whoever calls this brings the limit (`forerun.rewards.runner`).
    """
    truth = _required(ground_truth)
    if "\\boxed{" in truth or "####" in truth:  # a worked solution
        truth = marked_answer(truth) or truth
    wanted = number(truth)
    answer = marked_answer(response)
    if answer is None and wanted is not None:
        answer = last_number(response)
    given = None if answer is None else number(answer)
    if wanted is not None and given is not None:
        return float(wanted == given)
    if not response.strip() or (answer is None and wanted is not None):
        return 0.0
    import math_verify

    gold = math_verify.parse(f"${truth}$", parsing_timeout=None)
    # An unmarked formula is left for math-verify to find.
    candidate = math_verify.parse(response if answer is None else f"${answer}$", parsing_timeout=None)
    return float(math_verify.verify(gold, candidate, timeout_seconds=None))


def reasoning_gym_score(prompt: Messages, response: str, ground_truth: Any, extra: dict[str, Any]) -> float:
    """reasoning-gym's own score, in [0, 1].

    `extra` has the `task` and its `entry` (question, answer, metadata), as `forerun.data.sources` writes them. The
    scorer wants the bare answer: it gets the marked one (`marked_answer`), else the last number where the task's
    answer is a number, else the last line.
    """
    try:
        from reasoning_gym.factory import get_score_answer_fn
    except ImportError:
        raise ModuleNotFoundError('this reward needs reasoning-gym: pip install -e ".[demo]"') from None
    entry = extra["entry"]
    answer = _bare_answer(response, is_number=number(str(entry["answer"])) is not None)
    return float(get_score_answer_fn(extra["task"])(answer, entry))


def marked_answer(text: str, whole: bool = False) -> str | None:
    """The answer that a text marks as its last: <answer>...</answer>, else the last \\boxed{...}, else what follows the
    last ####, else what follows the last "answer is" or "answer:" in its line. None where nothing is marked.

    Of the last two kinds, which are prose, only the number is taken if there is one, unless `whole` is set.
    """
    value = (lambda phrase: phrase.strip().rstrip(".")) if whole else _main_value
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return str(tagged[-1]).strip()
    if (boxed := _last_boxed(text)) is not None:
        return boxed
    if "####" in text:
        return value(text.rsplit("####", 1)[1].strip().split("\n", 1)[0]) or None
    stated = _STATED.findall(text)
    return (value(stated[-1]) or None) if stated else None


def last_number(text: str) -> str | None:
    """The last number that stands in a text, as written."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def number(text: str) -> Decimal | None:
    """The number that a text is, if it is one: "1,200", "$5.00", "12.", "50%" (taken as 50),
    "3/4"; else None."""
    bare = text.strip().strip("$").removesuffix("\\%").removesuffix("%").rstrip(".").replace(",", "").strip()
    try:
        numerator, _, denominator = bare.partition("/")
        value = Decimal(numerator) / (Decimal(denominator) if denominator else 1)
    except ArithmeticError:
        return None
    return value if value.is_finite() else None


def _required(ground_truth: Any) -> str:
    """The ground truth as text: a number or a list as JSON writes it."""
    if ground_truth is None:
        raise ValueError("this reward needs a ground truth, and the prompt has none")
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth)


def _main_value(phrase: str) -> str:
    """The number that a phrase is about ("$18 per day." -> 18); LaTeX and phrases without a number stay whole."""
    phrase = phrase.strip().strip("*").strip().rstrip(".")
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$", "$")):
        if phrase.startswith(opening) and phrase.endswith(closing) and len(phrase) > len(opening):
            phrase = phrase[len(opening) : -len(closing)].strip()
    found = None if "\\" in phrase else _NUMBER.search(phrase)
    return found.group() if found else phrase


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[start:end].strip()
    return None


def _bare_answer(response: str, is_number: bool) -> str:
    text = response.strip()
    if (marked := marked_answer(text, whole=not is_number)) is None and is_number:
        marked = last_number(text)
    if marked is None:
        return text.split("\n")[-1].strip()
    return marked.replace(",", "") if is_number else marked
