"""The order in which a dataset is read: a function of (seed, epoch), and a place in it that can be saved."""

from __future__ import annotations

import random
from typing import TypedDict

from forerun.errors import ForerunError, UsageError


class DataOrderState(TypedDict):
    """What a checkpoint keeps of a `DataOrder`."""

    num_items: int
    seed: int
    shuffle: bool
    epoch: int
    position: int


def permutation(num_items: int, seed: int, epoch: int) -> list[int]:
    """The order of one epoch: the same for the same arguments, on every machine and in every process."""
    order = list(range(num_items))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class DataOrder:
    """Hands out indices epoch after epoch; every epoch has each index once, in an order of its own.

    Args:
        num_items: size of the dataset.
        seed: makes the orders.
        shuffle: False reads the dataset as it stands.

    Raises:
        UsageError: an empty dataset.
    """

    def __init__(self, num_items: int, seed: int = 0, shuffle: bool = True) -> None:
        if num_items < 1:
            raise UsageError("the dataset is empty: nothing to train on")
        self.num_items = num_items
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._order = self._make_order()

    def take(self, count: int) -> list[int]:
        """The next `count` indices, running over into the next epoch where one ends."""
        indices: list[int] = []
        while len(indices) < count:
            if self.position == self.num_items:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._make_order()
            found = self._order[self.position : self.position + count - len(indices)]
            indices += found
            self.position += len(found)
        return indices

    def state_dict(self) -> DataOrderState:
        """Where the order stands, as plain JSON values."""
        return {
            "num_items": self.num_items,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: DataOrderState) -> None:
        """Continue from a saved place.

        Raises:
            ForerunError: the dataset has another size than the one that the state belongs to.
        """
        if state["num_items"] != self.num_items:
            raise ForerunError(
                f"the dataset has {self.num_items} items, the checkpoint's had {state['num_items']}: "
                "resume with the same data, or start a new run"
            )
        self.seed, self.shuffle = state["seed"], state["shuffle"]
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._make_order()

    def _make_order(self) -> list[int]:
        return permutation(self.num_items, self.seed, self.epoch) if self.shuffle else list(range(self.num_items))
