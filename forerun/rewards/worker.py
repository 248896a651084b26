"""The process that reward functions run in: JSON lines in on stdin, JSON lines out on what was stdout.

Started as `python -m forerun.rewards.worker SPEC LIMIT_S KWARGS`. Says {"ready": true} or {"error": "..."} first, then
answers each request in turn. What a function prints goes to stderr. Should the parent die during a hang, an alarm ends
it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# (prompt, response, ground_truth, extra, data_source) -> score
Scorer = Callable[[list[dict[str, str]], str, Any, dict[str, Any], str], Any]
# A function that returns a dict of anything must not flood the pipe or the metrics.
MAX_FIELDS = 64
BUILT_IN = ("math", "exact_match", "reasoning_gym", "auto")


def resolve(spec: str, kwargs: Mapping[str, Any]) -> Scorer:
    """The function that a name means: a built-in one, "package.module:function" or "path/to/file.py:function".

    `kwargs` go to a function of the user's own with every call. `auto` picks by data source: reasoning_gym for
    `reasoning_gym/...` with the task's entry, math for everything else.

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

        def built_in(prompt: Any, response: str, truth: Any, extra: dict[str, Any], source: str) -> float:
            name = spec
            if spec == "auto":
                name = picked(source, extra)
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
    return _as_scorer(spec, function, kwargs)


def picked(data_source: str, extra: Mapping[str, Any]) -> str:
    """The reward that `auto` takes for a prompt."""
    return "reasoning_gym" if data_source.startswith("reasoning_gym/") and "entry" in extra else "math"


def _as_scorer(spec: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Scorer:
    """Call a function of the user's own as (prompt, response, ground_truth, extra), or as verl does if it has verl's
    names.

    Raises:
        ValueError: it cannot be called either way.
    """
    as_verl = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C
        signature = None
    is_verls = False
    if signature is not None:
        parameters = signature.parameters.values()
        takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        is_verls = "solution_str" in signature.parameters or (takes_any_name and not positional)
        try:
            signature.bind(**as_verl, **kwargs) if is_verls else signature.bind(None, None, None, None, **kwargs)
        except TypeError as error:
            wanted = ", ".join(as_verl) if is_verls else "prompt, response, ground_truth, extra"
            raise ValueError(f"reward {spec!r} cannot be called with ({wanted}) and reward.kwargs: {error}") from None
    if is_verls:
        return lambda prompt, response, truth, extra, source: function(
            data_source=source, solution_str=response, ground_truth=truth, extra_info=extra, **kwargs
        )
    return lambda prompt, response, truth, extra, source: function(prompt, response, truth, extra, **kwargs)


def answer(function: Scorer, line: str) -> dict[str, Any]:
    """One request to one reply: {"score": float, "fields": {...}} or {"event": ..., "detail": ...}."""
    request = json.loads(line)
    try:
        result = function(
            request["prompt"], request["response"], request["ground_truth"], request["extra"], request["data_source"]
        )
        if inspect.iscoroutine(result):  # verl takes async functions too
            result = asyncio.run(result)
    except Exception as error:
        return {"event": "exception", "detail": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}
    if isinstance(result, dict) and "score" not in result:
        return {"event": "not_a_number", "detail": "the reward returned a dict without 'score'"}
    # verl's functions may return {"score": ..., "acc": ..., ...}
    score = result["score"] if isinstance(result, dict) else result
    value = _number(score)
    if value is None or not -1e30 < value < 1e30:
        kind = f"a {type(score).__name__}, which is no number" if value is None else str(value)
        return {"event": "not_a_number", "detail": f"the reward returned {kind}"}
    return {"score": value, "fields": _fields(result) if isinstance(result, dict) else {}}


def _fields(result: Mapping[Any, Any]) -> dict[str, float]:
    """The finite numbers of a dict under names of a sensible length, score aside."""
    fields: dict[str, float] = {}
    for name, given in result.items():
        if len(fields) == MAX_FIELDS:
            break
        if isinstance(name, str) and name != "score" and len(name) <= 100:
            value = _number(given)
            if value is not None and math.isfinite(value):
                fields[name] = value
    return fields


def _number(value: Any) -> float | None:
    """A number of any kind (numpy's and torch's too) as a float; None for text and everything else."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except Exception:
        return None


def main() -> None:
    spec, limit_s, kwargs = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # A function that reads its stdin must find it empty, not take the next request.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def reply(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=replies, flush=True)

    try:
        function = resolve(spec, json.loads(kwargs))
    except ValueError as error:
        reply({"error": " ".join(str(error).split())})
        return
    reply({"ready": True})
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, limit_s + 10)
        result = answer(function, line)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(result)


if __name__ == "__main__":
    main()
