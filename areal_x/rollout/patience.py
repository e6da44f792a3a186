"""Patience: how long a run may generate groups none of which can be trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from areal_x.errors import UserError, at_least
from areal_x.types import Group

ONCE_SCORED = 10  # factor on failed_groups once an episode was scored
# Default bound on filtered groups, in steps: if 9 of 10 groups are filtered, 64 in a row have a
# probability of 1 in 850, and 128 of 1 in 700,000.
STEPS = 64
WARNINGS = (8, 4, 2)  # a message is shown after 1/8, 1/4 and 1/2 of the bound on filtered groups
DIFFERENT = 5  # rewards that a message lists one by one


@dataclass
class Patience:
    """Counts consecutive groups that were dropped, and ends the run when there are too many."""

    failed_groups: int
    """Maximum number of consecutive groups without a scored episode, until any episode was scored;
    10 times as many after that."""
    filtered_groups: int | None
    """Maximum number of consecutive groups that were scored but rejected by a filter; None allows
    64 steps' worth. Groups without a scored episode neither count nor reset the count."""
    groups_per_step: int
    open_ended: bool
    """True if others decide what is answered and rewarded (Workflow.open_ended); then nothing ends
    the run."""
    message: Callable[[str], None]
    failed_in_a_row: int = 0
    filtered_in_a_row: int = 0
    first_error: str | None = None
    # distinct rewards of the filtered groups, at most DIFFERENT + 1
    rewards: list[float] = field(default_factory=list)
    lowest: float = 0.0
    highest: float = 0.0

    def __post_init__(self) -> None:
        at_least("train.failed_groups", self.failed_groups, 1)
        if self.filtered_groups is None:
            self.filtered_groups = STEPS * self.groups_per_step
        at_least("train.filtered_groups", self.filtered_groups, 1)

    def kept(self) -> None:
        """Resets the counts: a group will be trained on."""
        self.failed_in_a_row = self.filtered_in_a_row = 0

    def failed(self, error: str | None, ever_scored: bool) -> None:
        """Counts a group without a scored episode. ever_scored: True if any other group had one.

        Raises: UserError if this is one too many.
        """
        if self.open_ended:
            return
        if self.failed_in_a_row == 0:
            self.first_error = error
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= self.failed_groups * (ONCE_SCORED if ever_scored else 1):
            raise UserError(
                f"none of {self.failed_in_a_row} groups in a row had a scored episode; the first"
                f" error: {self.first_error}"
            )

    def filtered(self, group: Group, reason: str | None) -> None:
        """Counts a scored group that was dropped. reason: what rejected it. Raises: UserError if
        this is one too many."""
        self.failed_in_a_row = 0
        self._remember(group.rewards)
        self.filtered_in_a_row += 1
        bound = self.filtered_groups
        assert bound is not None
        what = (
            f"{self.filtered_in_a_row:,} groups in a row were dropped because of {reason} (rewards"
            f" seen: {self._seen()})"
        )
        if self.filtered_in_a_row == bound and not self.open_ended:
            wanted = "check the reward and how hard the tasks are, or raise train.filtered_groups"
            raise UserError(f"{what}, so there is nothing to train on: {wanted}")
        if self.filtered_in_a_row in {max(1, bound // part) for part in WARNINGS}:
            end = (
                "" if self.open_ended else f"; after {bound:,} the run ends (train.filtered_groups)"
            )
            self.message(f"{what}{end}")

    def _remember(self, rewards: list[float]) -> None:
        if self.filtered_in_a_row == 0:
            self.rewards, self.lowest, self.highest = [], min(rewards), max(rewards)
        self.lowest, self.highest = min(self.lowest, *rewards), max(self.highest, *rewards)
        for reward in rewards:
            if reward not in self.rewards and len(self.rewards) <= DIFFERENT:
                self.rewards.append(reward)

    def _seen(self) -> str:
        if len(self.rewards) > DIFFERENT:
            return f"{self.lowest:g} to {self.highest:g}"
        return ", ".join(f"{reward:g}" for reward in sorted(self.rewards))
