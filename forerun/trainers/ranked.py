"""What the ranks of an RL run share of a step besides its gradients: one rollout and one reward for all of them.

Every rank runs the same trainer on all samples of a step. So prompts, completions and rewards must be the same on all,
and only the work is split: rollout engines answer a share of the prompts each, and rank 0 alone scores.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from forerun.engines.ranks import RankGroup
from forerun.errors import ForerunError
from forerun.models.weight_stream import Named, WeightStream
from forerun.rewards.protocol import RewardRequest, RewardResult
from forerun.rollout.protocol import Completion, NamedTensors, Request, RolloutEngine, SpeculationTotals
from forerun.trainers.judging import Scorer


class RankedScorer:
    """Scores on rank 0, for every rank.

    Args:
        ranks: all call `score` with the same requests.
        scorer: rank 0's; not used elsewhere.
        several_at_once: it may be called in several threads at a time. Otherwise one call at a time reaches it, from
            whichever threads they come.

    Raises:
        ForerunError: from `score`, on every rank, if the scorer failed.
    """

    def __init__(self, ranks: RankGroup, scorer: Scorer | None, several_at_once: bool = False) -> None:
        self.ranks = ranks
        self._scorer = scorer
        self._turn: AbstractContextManager[object] = nullcontext() if several_at_once else threading.Lock()

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        return self.ranks.on_first(lambda: self.score_alone(requests))

    def score_alone(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """On rank 0, whose others do not call: the scores for itself."""
        assert self._scorer is not None
        with self._turn:
            return self._scorer.score(requests)


class RankedRollout:
    """A `RolloutEngine` of several ranks: those that have an engine answer a share of the prompts each, for all.

    Requests of one prompt stay together. Every rank calls the same methods with the same arguments and gets the same
    results; `on_finish` is called when all completions are there.

    Args:
        ranks: the ranks of the run.
        engine: this rank's; None where it has none. One rank at least has one, and all engines hold one model.

    Raises:
        ForerunError: from `update_weights`, on every rank, if it failed on one. Nothing is generated then until an
            update has arrived on all.
    """

    def __init__(self, ranks: RankGroup, engine: RolloutEngine | None) -> None:
        self.ranks = ranks
        self.engine = engine
        about = None if engine is None else (engine.dtype, engine.num_speculative_tokens, engine.weight_version)
        given = ranks.collect(ranks.size, [about])
        self._torn = False
        self._serving = [rank for rank, found in enumerate(given) if found is not None]
        self.dtype, self.num_speculative_tokens, self.weight_version = next(found for found in given if found)

    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        if self._torn:
            raise ForerunError("the last weight update failed on one rank: update the weights before generating")
        prompts = [list(group) for _, group in itertools.groupby(requests, key=lambda r: tuple(r.prompt_token_ids))]
        own: list[Completion] = []
        if self.engine is not None:
            self.engine.num_speculative_tokens = self.num_speculative_tokens
            share = prompts[self._serving.index(self.ranks.rank) :: len(self._serving)]
            own = self.engine.generate([request for prompt in share for request in prompt])
        # Where rank 0 has all of them, the others have nothing to send.
        shares = [self.ranks.agree(own)] if self._serving == [0] else self.ranks.collect(self.ranks.size, [own])
        left = [iter(shares[rank]) for rank in self._serving]
        completions = [next(left[place % len(left)]) for place, prompt in enumerate(prompts) for _ in prompt]
        if on_finish is not None:
            for completion in completions:
                on_finish(completion)
        return completions

    def add(self, requests: Sequence[Request]) -> None:
        raise ForerunError("a rollout of several ranks takes no request on the way: give generate() all of them")

    def abort(self, request_ids: Iterable[str]) -> None:
        if self.engine is not None:
            self.engine.abort(request_ids)

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self._torn = True  # until all engines have the same
        engine = self.engine

        def update(made: Iterator[Named]) -> None:
            assert engine is not None
            # A stream stays one: gathered weights are copies, and no rank has room for all of them.
            if isinstance(named_tensors, WeightStream):
                engine.update_weights(WeightStream(named_tensors.described, made), version)
            else:
                engine.update_weights(made, version)

        self.ranks.take(named_tensors, None if engine is None else update)
        self.weight_version = version
        self._torn = False

    def drafter_digest(self) -> str | None:
        """That of all engines; where they are not the same, a text that is none."""
        own = None if self.engine is None else self.engine.drafter_digest()
        found = self.ranks.collect(self.ranks.size, [own])
        digests = {found[rank] for rank in self._serving}
        return digests.pop() if len(digests) == 1 else "not the same on all ranks"

    def speculation_totals(self) -> SpeculationTotals | None:
        own = None if self.engine is None else self.engine.speculation_totals()
        known = [totals for totals in self.ranks.collect(self.ranks.size, [own]) if totals is not None]
        if len(known) < len(self._serving):
            return None
        return SpeculationTotals(
            sum(totals.num_verify_steps for totals in known),
            sum(totals.num_draft_tokens for totals in known),
            sum(totals.num_accepted_tokens for totals in known),
            [sum(kept) for kept in itertools.zip_longest(*(t.accepted_per_depth for t in known), fillvalue=0)],
        )

    def sleep(self) -> None:
        if self.engine is not None:
            self.engine.sleep()

    def wake(self) -> None:
        if self.engine is not None:
            self.engine.wake()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
