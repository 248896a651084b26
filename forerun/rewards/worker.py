"""The process that reward functions run in: JSON lines in on stdin, JSON lines out on what was stdout.

Started as `python -m forerun.rewards.worker SPEC LIMIT_S KWARGS`. Says {"ready": true} or {"error": "..."} first, then
answers each request in turn. What a function prints goes to stderr. Should the parent die during a hang, an alarm ends
it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# (prompt, response, ground_truth, extra, data_source) -> score
Scorer = Callable[[list[dict[str, str]], str, str | None, dict[str, Any], str], Any]
BUILT_IN = ("math", "exact_match", "reasoning_gym", "auto")


def resolve(spec: str, kwargs: Mapping[str, Any]) -> Scorer:
    """The function that a name means: a built-in one, "package.module:function" or "path/to/file.py:function".

    `kwargs` go to a function of the user's own with every call. `auto` picks by data source: reasoning_gym for
    `reasoning_gym/...`, math for everything else.

    Raises:
        ValueError: one line that says what is wrong with the name.
    """
    if spec in BUILT_IN:
        if kwargs:
            raise ValueError(f"reward {spec!r} takes no kwargs, but got {', '.join(kwargs)}: leave reward.kwargs empty")
        from forerun.rewards import answers

        # Imported now, not within the first response's time limit.
        for package, served in (("math_verify", ("math", "auto")), ("reasoning_gym", ("reasoning_gym", "auto"))):
            if spec in served and importlib.util.find_spec(package):
                importlib.import_module(package)
        functions = {
            "math": answers.math_answer,
            "exact_match": answers.exact_match,
            "reasoning_gym": answers.reasoning_gym_score,
        }

        def built_in(prompt: Any, response: str, truth: str | None, extra: dict[str, Any], source: str) -> float:
            name = spec
            if spec == "auto":
                name = "reasoning_gym" if source.startswith("reasoning_gym/") else "math"
            return functions[name](prompt, response, truth, extra)

        return built_in

    module_name, colon, function_name = spec.rpartition(":")
    if not colon:
        raise ValueError(
            f"reward {spec!r} is not one of {', '.join(BUILT_IN)}, nor module:function or file.py:function"
        )
    try:
        if module_name.endswith(".py"):
            if not Path(module_name).is_file():
                raise ValueError(f"reward {spec!r}: no such file")
            found = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules[found.name] = module
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"reward {spec!r} cannot be imported: {type(error).__name__}: {error}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"reward {spec!r}: {module_name} has no function {function_name!r}")
    if "solution_str" in inspect.signature(function).parameters:
        return lambda prompt, response, truth, extra, source: function(
            data_source=source, solution_str=response, ground_truth=truth, extra_info=extra, **kwargs
        )
    return lambda prompt, response, truth, extra, source: function(prompt, response, truth, extra, **kwargs)


def answer(function: Scorer, line: str) -> dict[str, Any]:
    """One request to one reply: {"score": float} or {"event": ..., "detail": ...}."""
    request = json.loads(line)
    try:
        score = function(
            request["prompt"], request["response"], request["ground_truth"], request["extra"], request["data_source"]
        )
        if isinstance(score, dict) and "score" in score:  # verl's functions may return {"score": ..., "acc": ...}
            score = score["score"]
        value = float(score)
    except Exception as error:
        return {"event": "exception", "detail": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}
    if not -1e30 < value < 1e30:
        return {"event": "not_a_number", "detail": f"the reward returned {value}"}
    return {"score": value}


def main() -> None:
    spec, limit_s, kwargs = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=replies, flush=True)

    try:
        function = resolve(spec, json.loads(kwargs))
    except ValueError as error:
        reply({"error": " ".join(str(error).split())})
        return
    reply({"ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, limit_s + 10)
        result = answer(function, line)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(result)


if __name__ == "__main__":
    main()
