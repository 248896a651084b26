"""Keeps the rollout workers busy in a thread of its own: opens groups, joins completions to groups, has them judged.

The trainer's thread takes the groups of a step (`next_step`), and stops all this for a weight update, an evaluation or
a checkpoint (`pause`, `resume`); in between, workers and account are its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.errors import ForerunError
from forerun.rewards.protocol import RewardResult
from forerun.rollout.dispatch import Dispatch
from forerun.rollout.pool import WorkerPool
from forerun.rollout.protocol import Completion, Request
from forerun.trainers.asynchronous.ledger import Group, Ledger
from forerun.trainers.asynchronous.stored import check_answers, ledger_state, restore_ledger


@dataclass(frozen=True)
class Supply:
    """What the rollouts ask of their trainer; called from their threads, one call of each at a time.

    Attributes:
        draw: the next prompt, as its number in the data set.
        requests: one for each response of a group.
        judge: the rewards of a complete group.
        drop: whether a group with these rewards is not to be trained on.
    """

    draw: Callable[[], int]
    requests: Callable[[Group], Sequence[Request]]
    judge: Callable[[Group], list[RewardResult]]
    drop: Callable[[Group, list[RewardResult]], bool]


class Rollouts:
    """The rollout half of an asynchronous run. It begins paused.

    Args:
        ledger: the account; not touched by others but between `pause` and `resume`.
        pool: the workers, likewise.
        supply: see there.
        tokenizer: the model's.
        partial: a pause cuts short what runs; otherwise it waits for that.
        in_batches: leave nothing to time, so that a run repeats: a whole window of groups is opened when nothing is
            under way, handed out at once, and finished before a pause.
        most_dropped: groups dropped in a row, without one that is kept, at which `next_step` and `pause` give up; None
            sets no limit.
        num_judges: groups that are judged at the same time.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: WorkerPool,
        supply: Supply,
        tokenizer: PreTrainedTokenizerBase,
        *,
        partial: bool,
        in_batches: bool,
        most_dropped: int | None = None,
        num_judges: int = 1,
    ) -> None:
        self.ledger = ledger
        self.pool = pool
        self.supply = supply
        self.partial = partial
        self.in_batches = in_batches
        self.most_dropped = most_dropped
        self._tokenizer = tokenizer
        self._dispatch = Dispatch(tokenizer)
        self._places: dict[str, tuple[int, int]] = {}  # request id -> (group, place in it)
        self._changed = threading.Condition()
        self._want_pause = self._paused = True
        self._stopping = False
        self._judging = 0
        self._failure: BaseException | None = None
        self._judge = ThreadPoolExecutor(num_judges, thread_name_prefix="judge")
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    # ---- for the trainer's thread

    def next_step(self) -> tuple[list[Group], list[Group]] | None:
        """Wait for the groups of the next step; see `Ledger.take_step`. None: every worker is lost, and the next weight
        update may bring others.

        Raises:
            ForerunError: what ended the thread; no worker is left; too many groups were dropped.
        """
        with self._changed:
            while True:
                self._check()
                if (found := self.ledger.take_step()) is not None:
                    self._changed.notify_all()
                    return found
                if not self.pool.workers:
                    return None
                self._changed.wait()

    def num_ready(self) -> int:
        """Groups that wait to be trained on; at any time."""
        with self._changed:
            return self.ledger.num_ready

    def pause(self) -> None:
        """Wait until no worker holds a request; nothing happens then until `resume`.

        Raises:
            ForerunError: as `next_step`.
        """
        with self._changed:
            self._want_pause = True
            self._changed.notify_all()
            while not self._paused:
                self._check()
                self._changed.wait()
            self._check()

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._want_pause = self._paused = False
            self._changed.notify_all()

    def generate(self, requests: Sequence[Request], answers: dict[str, Completion]) -> list[Completion] | None:
        """While paused: complete these on all workers; see `WorkerPool.generate`."""
        return self.pool.generate(requests, Dispatch(self._tokenizer), answers)

    def state_dict(self) -> dict[str, Any]:
        """While paused: the whole account as JSON values, with what is written of unfinished responses."""
        with self._changed:
            written = {
                self._places[pending.request.request_id]: pending.written
                for pending in self._dispatch.pending()
                if pending.written is not None
            }
            return ledger_state(self.ledger, written)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """While paused, before anything was opened: go on from there. Complete groups without rewards are judged.

        Raises:
            ForerunError: see `restore_ledger`; the responses are to other prompts, or longer than they may be now.
        """
        with self._changed:
            written = restore_ledger(self.ledger, state)
            for _, group in sorted(self.ledger.groups.items()):
                self._ask(group, written)
                if not group.ready and len(group.completions) == self.ledger.group_size:
                    self._start_judging(group)

    def close(self) -> None:
        """End the threads and close the workers; not the judges' calls of the reward, which may hang."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._judge.shutdown(wait=False, cancel_futures=True)
        self.pool.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self.pool.can_recover:
            raise self.pool.all_lost()
        if (
            self.most_dropped is not None
            and len(self.ledger.dropped) >= self.most_dropped
            and not self.ledger.num_ready
        ):
            raise ForerunError(
                f"step {self.ledger.steps_done + 1}: {len(self.ledger.dropped)} groups in a row had nothing to learn "
                "from: the task is solved or out of reach; give other prompts, or raise rollout.n or "
                "algorithm.filter_groups.max_num_gen_batches"
            )

    # ---- the thread

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._stopping:
                        return
                    if self._want_pause and (self._paused or self._at_rest()):
                        self._paused = True
                        self._changed.notify_all()
                        # Not for `_want_pause`: it may be up again before this thread has seen that it was down.
                        self._changed.wait_for(lambda: self._stopping or not self._paused)
                        continue
                    self._open()
                    give = not self._want_pause or self.in_batches
                answers = self.pool.serve(
                    self._dispatch, give=give, at_once=self.in_batches, abort=self._want_pause and self.partial
                )
                with self._changed:
                    for answer in answers:
                        number, place = self._places.pop(answer.request_id)
                        if (group := self.ledger.put(number, place, answer)) is not None:
                            self._start_judging(group)
                    self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # ---- with the lock held

    def _at_rest(self) -> bool:
        if self._dispatch.held():
            return False
        if not self.in_batches or not self.pool.workers:
            return True
        return not (self._dispatch.num_waiting or self._judging or self.ledger.room)

    def _open(self) -> None:
        """Open the groups that the window allows."""
        if self._want_pause and not self.in_batches:
            return
        if self.in_batches and (self._dispatch.pending() or self._judging):
            return
        while self.ledger.room:
            self._ask(self.ledger.open(self.supply.draw()), {})

    def _ask(self, group: Group, written: Mapping[tuple[int, int], Completion]) -> None:
        """Let the requests for a group's missing responses wait."""
        for place, request in enumerate(self.supply.requests(group)):
            begun = written.get((group.number, place))
            if (found := group.completions.get(place, begun)) is not None:
                check_answers(found, request, is_whole=found is not begun)
            if place not in group.completions:
                self._places[request.request_id] = (group.number, place)
                self._dispatch.add(request, begun)

    def _start_judging(self, group: Group) -> None:
        self._judging += 1
        self._judge.submit(self._judge_group, group)

    # ---- the judges' threads

    def _judge_group(self, group: Group) -> None:
        try:
            rewards = self.supply.judge(group)
            with self._changed:
                self.ledger.judge(group.number, rewards)
                if self.supply.drop(group, rewards):
                    self.ledger.drop(group.number)
                self._judging -= 1
                self._changed.notify_all()
        except BaseException as error:
            self._fail(error)
