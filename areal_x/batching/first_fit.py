"""First-fit decreasing bin packing: longest first, each into the first row with room for it.

It needs at most 11/9 of the minimum number of rows plus 6/9 (G. Dósa, The tight bound of first fit
decreasing bin-packing algorithm, 2007).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32


def first_fit_decreasing(
    lengths: Int32[np.ndarray, " n"], row_length: int
) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """Returns the row, the start in the row and the segment id (1.. within the row) of each length.

    A binary tree over the rows holds the maximum room below each node, so the first row with enough
    room is found in log2(n) steps.
    """
    n = len(lengths)
    rows, starts, segments = (np.zeros(n, np.int32) for _ in range(3))
    leaves = 1 << max(n - 1, 0).bit_length()
    # node k has the children 2k and 2k + 1; row r is the leaf `leaves + r`
    room = [row_length] * (2 * leaves)
    count = [0] * leaves  # sequences in each row
    for i in np.argsort(-lengths, kind="stable").tolist():
        length, node = int(lengths[i]), 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        row = node - leaves
        count[row] += 1
        rows[i], starts[i], segments[i] = row, row_length - room[node], count[row]
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows, starts, segments
