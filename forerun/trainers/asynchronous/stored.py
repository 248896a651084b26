"""An asynchronous run's account in a checkpoint: what is finished and not trained on, what is written of the rest.

JSON values, and lists of numbers as base64 of little-endian arrays: a response has thousands of tokens, and every bit
of their log-probabilities counts. Nothing is pickled.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from forerun.errors import ForerunError
from forerun.rewards.protocol import RewardResult
from forerun.rollout.protocol import Completion, Request
from forerun.trainers.asynchronous.ledger import Group, Ledger

# Lists that are as long as a text.
_ARRAYS = {
    "prompt_token_ids": "<i8",
    "token_ids": "<i8",
    "log_probs": "<f8",
    "raw_log_probs": "<f8",
    "weight_versions": "<i8",
    "accepted_draft": "|b1",
}
_COUNTS = ("version", "steps_done", "num_opened", "num_dropped")


def completion_state(completion: Completion) -> dict[str, Any]:
    """All fields of a completion as JSON values."""
    state = {item.name: getattr(completion, item.name) for item in fields(completion)}
    for name, dtype in _ARRAYS.items():
        if state[name] is not None:
            state[name] = base64.b64encode(np.asarray(state[name], dtype).tobytes()).decode("ascii")
    return state


def restored_completion(state: Mapping[str, Any]) -> Completion:
    """`completion_state`'s argument."""
    values = dict(state)
    for name, dtype in _ARRAYS.items():
        if values[name] is not None:
            values[name] = np.frombuffer(base64.b64decode(values[name]), dtype).tolist()
    return Completion(**values)


def ledger_state(ledger: Ledger, written: Mapping[tuple[int, int], Completion]) -> dict[str, Any]:
    """A ledger, and the beginnings of responses by (group, place), as JSON values."""
    return {
        **{name: getattr(ledger, name) for name in _COUNTS},
        "groups_per_step": ledger.groups_per_step,
        "group_size": ledger.group_size,
        "groups": [_group_state(group) for _, group in sorted(ledger.groups.items())],
        "dropped": [_group_state(group) for _, group in sorted(ledger.dropped.items())],
        "written": [[number, place, completion_state(c)] for (number, place), c in sorted(written.items())],
    }


def restore_ledger(ledger: Ledger, state: Mapping[str, Any]) -> dict[tuple[int, int], Completion]:
    """Put `ledger_state`'s result into a ledger; returns the beginnings.

    Raises:
        ForerunError: the state is of a run with other batches or a wider window, or damaged.
    """
    for name, setting in (("groups_per_step", "train_batch_size"), ("group_size", "rollout.n")):
        if state.get(name) != getattr(ledger, name):
            raise ForerunError(
                f"the checkpoint holds rollouts for {setting}={state.get(name)}, not {getattr(ledger, name)}: resume "
                "with that, or give another trainer.output_dir"
            )
    try:
        for name in _COUNTS:
            setattr(ledger, name, int(state[name]))
        ledger.groups = {entry["number"]: _restored_group(entry) for entry in state["groups"]}
        ledger.dropped = {entry["number"]: _restored_group(entry) for entry in state["dropped"]}
        written = {(number, place): restored_completion(c) for number, place, c in state["written"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ForerunError(
            f"the checkpoint's rollouts cannot be read ({error!r:.100}): resume from an older checkpoint"
        ) from error
    if (age := _oldest(ledger, written)) > ledger.max_staleness:
        raise ForerunError(
            f"the checkpoint holds rollouts that would be {age} steps old, and "
            f"async_training.max_staleness={ledger.max_staleness}: resume with {age} or more, or give another "
            "trainer.output_dir"
        )
    return written


def check_answers(completion: Completion, request: Request, is_whole: bool) -> None:
    """Check that what a checkpoint holds is a response to this request, or the beginning of one.

    Raises:
        ForerunError: the data or a limit has changed.
    """
    if completion.prompt_token_ids != request.prompt_token_ids:
        raise ForerunError(
            f"the checkpoint's response {request.request_id} is to another prompt than the data's: resume with the "
            "same data.train_files and tokenizer, or give another trainer.output_dir"
        )
    count, limit = len(completion.token_ids), request.sampling.max_tokens
    if count > limit or (count == limit and not is_whole):
        raise ForerunError(
            f"the checkpoint holds {count} tokens of a response, and rollout.max_response_length={limit}: resume with "
            "the limit of the run that wrote it, or give another trainer.output_dir"
        )


def _oldest(ledger: Ledger, written: Mapping[tuple[int, int], Completion]) -> int:
    """The most steps by which a token of the open groups can be older than the weights that will train on it."""
    ages = [0]
    for place, (number, group) in enumerate(sorted(ledger.groups.items())):
        pieces = [*group.completions.values(), *(piece for (of, _), piece in written.items() if of == number)]
        versions = [version for piece in pieces for version in piece.weight_versions]
        if len(group.completions) < ledger.group_size:  # the workers' weights go on with it
            versions.append(ledger.version)
        ages.append(ledger.steps_done + place // ledger.groups_per_step - min(versions, default=ledger.version))
    return max(ages)


def _group_state(group: Group) -> dict[str, Any]:
    return {
        "number": group.number,
        "item": group.item,
        "completions": [[place, completion_state(c)] for place, c in sorted(group.completions.items())],
        "rewards": None if group.rewards is None else [asdict(reward) for reward in group.rewards],
    }


def _restored_group(entry: Mapping[str, Any]) -> Group:
    rewards = entry["rewards"]
    return Group(
        number=entry["number"],
        item=entry["item"],
        completions={place: restored_completion(state) for place, state in entry["completions"]},
        rewards=None if rewards is None else [RewardResult(**reward) for reward in rewards],
    )
