"""The first process of an agent's program: becomes its guard (areal_x.runtime.guard) and executes
the command below it. Imports little, since every episode waits for it."""

from __future__ import annotations

import os
import sys

from areal_x.runtime import guard


def main(lifeline_fd: int, words: list[str], processes: int, folder: str | None = None) -> None:
    """words: the command. processes: most that it may run at once. folder: deleted at the end."""

    def work() -> None:
        try:
            os.execvp(words[0], words)
        except OSError as error:
            print(f"{words[0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)

    guard.run_guarded(
        work,
        lifeline_fd,
        owners_fds=(1, 2),
        processes=processes,
        folder=folder,
        ends_with_worker=True,
    )
