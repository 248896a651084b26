"""Which groups are open, which are ready, and which a step trains on: the account of an asynchronous run.

Groups (a prompt and its responses) are numbered in the order of the data. Step s trains on the B oldest that were not
dropped, which are [sB, (s+1)B) where none is. A group is opened only once the workers' weights are those of at least
floor(p/B) - max_staleness steps, p being its place among the groups not dropped. Its tokens are sampled by these
weights or newer ones, so none is trained on that is more than `max_staleness` steps old, whatever else happens.
Dropping a group moves those behind it forward, to an earlier step, which can only make them fresher.

Nothing here knows of time, threads or workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.errors import ForerunError
from forerun.rewards.protocol import RewardResult
from forerun.rollout.protocol import Completion


@dataclass
class Group:
    """A prompt and its responses.

    Attributes:
        number: its place in the order of the data.
        item: which of the data set's prompts it is.
        completions: by place in the group; those that are there.
        rewards: one for each, once it was judged: then it is ready to be trained on.
    """

    number: int
    item: int
    completions: dict[int, Completion] = field(default_factory=dict)
    rewards: list[RewardResult] | None = None

    @property
    def ready(self) -> bool:
        return self.rewards is not None

    def answers(self) -> list[Completion]:
        """The completions in order."""
        return [self.completions[place] for place in sorted(self.completions)]


class Ledger:
    """The groups of a run that were opened and not trained on.

    Args:
        groups_per_step: B.
        group_size: responses for each prompt.
        max_staleness: steps by which weights that sample a token may be older than those that train on it.

    Attributes:
        version: of the workers' weights: the steps that these were trained for.
        steps_done: steps that were handed out.
        num_opened: groups so far, which is the number of the next one.
        num_dropped: of these, those dropped.
        groups: those that wait or are under way, by number.
        dropped: those dropped since the last step's; see `take_step`.
    """

    def __init__(self, groups_per_step: int, group_size: int, max_staleness: int) -> None:
        self.groups_per_step = groups_per_step
        self.group_size = group_size
        self.max_staleness = max_staleness
        self.version = 0
        self.steps_done = 0
        self.num_opened = 0
        self.num_dropped = 0
        self.groups: dict[int, Group] = {}
        self.dropped: dict[int, Group] = {}

    @property
    def room(self) -> int:
        """Groups that may be opened now."""
        window = (self.version + self.max_staleness + 1) * self.groups_per_step
        return max(0, window - (self.num_opened - self.num_dropped))

    @property
    def num_ready(self) -> int:
        return sum(group.ready for group in self.groups.values())

    def open(self, item: int) -> Group:
        """The next group.

        Raises:
            ValueError: there is no room for it.
        """
        if not self.room:
            raise ValueError(f"group {self.num_opened} has to wait for newer weights than those of step {self.version}")
        group = Group(self.num_opened, item)
        self.groups[group.number] = group
        self.num_opened += 1
        return group

    def put(self, number: int, place: int, completion: Completion) -> Group | None:
        """Enter a response; returns its group if that is complete by now, and None else.

        Raises:
            ValueError: the group is not open, or has that response.
        """
        group = self.groups.get(number)
        if group is None or place in group.completions or not 0 <= place < self.group_size:
            raise ValueError(f"response {place} of group {number} is not open")
        group.completions[place] = completion
        return group if len(group.completions) == self.group_size else None

    def judge(self, number: int, rewards: Sequence[RewardResult]) -> None:
        """A complete group's rewards: it is ready."""
        group = self.groups[number]
        if not len(rewards) == len(group.completions) == self.group_size:
            raise ValueError(f"group {number} has {len(group.completions)} responses, and {len(rewards)} rewards")
        group.rewards = list(rewards)

    def drop(self, number: int) -> None:
        """A group is not to be trained on; another one may be opened in its place."""
        self.dropped[number] = self.groups.pop(number)
        self.num_dropped += 1

    def take_step(self) -> tuple[list[Group], list[Group]] | None:
        """The groups of the next step, and those dropped before the last of them, each in order.

        None as long as one of them, or one before them, is not ready or dropped.
        """
        first = [self.groups[number] for number in sorted(self.groups)[: self.groups_per_step]]
        if len(first) < self.groups_per_step or not all(group.ready for group in first):
            return None
        for group in first:
            del self.groups[group.number]
        self.steps_done += 1
        passed = [number for number in sorted(self.dropped) if number < first[-1].number]
        return first, [self.dropped.pop(number) for number in passed]

    def updated(self, version: int) -> None:
        """The workers have the weights of so many steps."""
        if not self.version <= version <= self.steps_done:
            raise ForerunError(f"weights of step {version} after those of {self.version}, in step {self.steps_done}")
        self.version = version
