"""Ranks that train together while rank 0 alone has the rollout workers.

The others learn what came of its work, and gather weights with it as often as its workers want them: never, once, or
once more for one that takes a lost one's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from forerun.engines.protocol import TrainingEngine
from forerun.engines.ranks import Made, RankGroup
from forerun.errors import ForerunError, one_line
from forerun.models.weight_stream import Named, WeightStream

Result = TypeVar("Result")
_Weights = Literal["named_weights", "drafter_weights"]


class FirstRank:
    """Work of rank 0, in which the engine's weights can be read though it takes every rank to gather them.

    Args:
        ranks: those that share the engine.
        engine: this rank's.
    """

    def __init__(self, ranks: RankGroup, engine: TrainingEngine) -> None:
        self.ranks = ranks
        self._engine = engine
        self._weights: Made[Named] | None = None  # that rank 0 asked for last

    def does(self, work: Callable[[], Result]) -> Result:
        """Call `work` on rank 0 and return what it returns. The others call this at the same point, do not call `work`,
        and get a copy.

        Raises:
            ForerunError: on the other ranks, whatever `work` raised on rank 0.
        """
        if self.ranks.rank != 0:
            return self._follow()
        try:
            result = work()
        except Exception as error:
            self._say("failed", one_line(error))
            raise
        self._say("done", result)
        return result

    def named_weights(self) -> WeightStream:
        """The engine's, within `does`; rank 0 need not read all of them."""
        return self._gather("named_weights")

    def drafter_weights(self) -> WeightStream:
        """The engine's, likewise."""
        return self._gather("drafter_weights")

    def _gather(self, which: _Weights) -> WeightStream:
        self._say(which)
        stream: WeightStream = getattr(self._engine, which)()
        self._weights = Made(stream)
        return WeightStream(stream.described, self._weights)

    def _say(self, word: _Weights | Literal["done", "failed"], value: Any = None) -> None:
        if self._weights is not None:
            # To the end, as the others do. If gathering failed that is raised: they wait in it, and hear nothing else
            # until they end with this process.
            _read(self._weights)
            self._weights = None
        self.ranks.agree((word, value))

    def _follow(self) -> Any:
        while True:
            word, value = self.ranks.agree(("", None))
            match word:
                case "done":
                    return value
                case "failed":
                    raise ForerunError(f"rank 0: {value}")
                case _:
                    _read(getattr(self._engine, word)())


def _read(weights: Iterator[Named]) -> None:
    for _ in weights:
        pass
