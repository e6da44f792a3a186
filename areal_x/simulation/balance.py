"""Which of many equal servers takes the next request."""

from __future__ import annotations


class Balance:
    """Gives each request to a server with the fewest in flight: of several, to the one that has had
    so few for longest.

    In constant time: to look at each of a thousand servers would cost more than the rest of a
    request's way.

    in_flight: requests of each server now.
    """

    def __init__(self, servers: int) -> None:
        self.in_flight = [0] * servers
        # the servers of each load, as ordered sets
        self._of_load: list[dict[int, None]] = [dict.fromkeys(range(servers))]
        self._least = 0

    def take(self) -> int:
        """A server, which has one request more from now on."""
        while not self._of_load[self._least]:
            self._least += 1
        index = next(iter(self._of_load[self._least]))
        self._move(index, 1)
        return index

    def give_back(self, index: int) -> None:
        """A request of this server has ended."""
        self._move(index, -1)
        self._least = min(self._least, self.in_flight[index])

    def _move(self, index: int, change: int) -> None:
        del self._of_load[self.in_flight[index]][index]
        self.in_flight[index] += change
        if self.in_flight[index] == len(self._of_load):
            self._of_load.append({})
        self._of_load[self.in_flight[index]][index] = None
