"""Items that ranks make together reach the rank that wants them, and its failure the others, or none of them waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from forerun.engines.ranks import RankGroup
from forerun.errors import ForerunError


class Told(RankGroup):
    """A rank alone that notes what it tells the others."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def collect(self, count: int, own: Sequence[Any]) -> list[Any]:
        self.said += own
        return super().collect(count, own)


def torn() -> Iterator[int]:
    yield from range(2)
    raise torch.OutOfMemoryError("no room for a third")


def through(items: Iterator[int]) -> Iterator[int]:
    """A generator, which closes what it reads from when it is dropped."""
    yield from items


def swallows(items: Iterator[int]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        list(items)


def gives_up(items: Iterator[int]) -> None:
    for _ in through(items):
        raise ForerunError("the line is down")


@pytest.mark.parametrize("work", [list, swallows, gives_up])
def test_items_that_cannot_be_made_end_the_rank_without_a_word(work: Any) -> None:
    """The others are in the midst of making them."""
    ranks = Told()
    with pytest.raises(torch.OutOfMemoryError, match="no room for a third"):
        ranks.first_takes(torn(), work)
    assert ranks.said == []


@pytest.mark.parametrize("work", [list, gives_up, None])
def test_all_items_are_made_whoever_gives_up(work: Any) -> None:
    ranks, made = Told(), []
    items = (made.append(number) for number in range(5))
    if work is gives_up:
        with pytest.raises(ForerunError, match="the line is down"):
            ranks.take(items, work)
    else:
        ranks.take(items, work)
    assert made == [0, 1, 2, 3, 4] and [said is None for said in ranks.said] == [work is not gives_up]
