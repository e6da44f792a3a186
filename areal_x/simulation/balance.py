"""Least-loaded routing over many equal servers."""

from __future__ import annotations


class LeastLoaded:
    """Assigns each request to a server with the fewest requests in flight; among equals, to the one
    that has had so few for longest.

    In constant time: scanning a thousand servers would cost more than everything else that a
    simulated request does.

    in_flight: current number of requests of each server.
    """

    def __init__(self, servers: int) -> None:
        self.in_flight = [0] * servers
        # by load, the servers with that load as an ordered set
        self._servers: list[dict[int, None]] = [dict.fromkeys(range(servers))]
        self._least = 0

    def acquire(self) -> int:
        """Returns the index of a server, and counts one more request in flight there."""
        while not self._servers[self._least]:
            self._least += 1
        index = next(iter(self._servers[self._least]))
        self._move(index, 1)
        return index

    def release(self, index: int) -> None:
        """Counts one request less in flight on this server."""
        self._move(index, -1)
        self._least = min(self._least, self.in_flight[index])

    def _move(self, index: int, change: int) -> None:
        del self._servers[self.in_flight[index]][index]
        self.in_flight[index] += change
        if self.in_flight[index] == len(self._servers):
            self._servers.append({})
        self._servers[self.in_flight[index]][index] = None
