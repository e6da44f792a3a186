"""How long a run generates while nothing that it generates can be trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from areal_x.errors import UserError, at_least
from areal_x.types import Group

# times as many failed groups in a row end a run in which something was scored before
ONCE_SCORED = 10
# of filtered groups: with 9 of 10 filtered, 64 in a row are one case in 850, and 128 one in 700,000
STEPS = 64
WARNINGS = (8, 4, 2)  # parts of the bound on filtered groups after which a message is shown
DIFFERENT = 5  # rewards that a message lists one by one


@dataclass
class Patience:
    """Counts groups in a row that were given back, and ends the run when there are too many.

    failed_groups: without one scored episode; the bound while nothing was ever scored, 10 times as
    many after that. filtered_groups: scored and given back all the same, by default 64 steps'
    worth; groups without a scored episode neither count as filtered nor end the count. open_ended:
    others decide what is answered and rewarded, so nothing ends the run.
    """

    failed_groups: int
    filtered_groups: int | None
    groups_per_step: int
    open_ended: bool
    message: Callable[[str], None]
    failed_in_a_row: int = 0
    filtered_in_a_row: int = 0
    first_error: str | None = None
    # different ones of the filtered groups, at most DIFFERENT + 1
    rewards: list[float] = field(default_factory=list)
    lowest: float = 0.0
    highest: float = 0.0

    def __post_init__(self) -> None:
        at_least("train.failed_groups", self.failed_groups, 1)
        if self.filtered_groups is None:
            self.filtered_groups = STEPS * self.groups_per_step
        at_least("train.filtered_groups", self.filtered_groups, 1)

    def kept(self) -> None:
        """A group is trained on."""
        self.failed_in_a_row = self.filtered_in_a_row = 0

    def failed(self, error: str | None, ever_scored: bool) -> None:
        """No episode of a group was scored. ever_scored: whether another group's was.

        Raises: UserError for the last of too many.
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

    def filtered(self, group: Group, by: str | None) -> None:
        """A scored group was given back. by: what gave it back. Raises: UserError for the last of
        too many."""
        self.failed_in_a_row = 0
        self._remember(group.rewards)
        self.filtered_in_a_row += 1
        bound = self.filtered_groups
        assert bound is not None
        what = (
            f"{self.filtered_in_a_row:,} groups in a row were given back because of {by} (rewards"
            f" seen: {self._seen()})"
        )
        if self.filtered_in_a_row == bound and not self.open_ended:
            wanted = (
                "look at the reward and at how hard the tasks are, or raise train.filtered_groups"
            )
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
