"""Discounted sums of what still comes, or comes next, in many episodes at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Episodes are cut into pieces of so many rows, which are summed beside each other.
_PIECE = 32


def discounted_sums(values: Floats, lengths: npt.NDArray[np.int64], discount: float) -> Floats:
    """x_t = values_t + discount x_{t+1} within each episode, with nothing behind its last row.

    Rows of an episode depend on each other, rows of two do not. So each episode is cut into pieces of 32 rows, and all
    pieces are summed backward beside each other, in 31 steps. What is missing then is what comes behind a piece: it is
    the same kind of sum, of the pieces' first rows and with a discount of 32 steps, and found in the same way.

    With pieces of 2 rows, values 1, 2, 4, 8, 16 of one episode and a discount of 0.5: the pieces 1 2 | 4 8 | 16 give
    2 2 | 8 8 | 16. Their first rows 2, 8, 16 with a discount of 0.25 give 5, 12, 16. Behind the first piece come 12, a
    quarter and a half of which are added to it, behind the second 16: 5 8 | 12 16 | 16.

    What an episode's rows become does not depend on the other episodes, not even in the last bit, and takes about as
    long as ``numpy.cumsum``.

    Args:
        values: float64 ``[n]``, episode after episode.
        lengths: The rows of each episode, from 1, int64 ``[e]``, ``n`` in all.
        discount: Of one step.

    Returns:
        float64 ``[n]``.

    Example:
        >>> import numpy as np
        >>> discounted_sums(np.array([1.0, 2.0, 4.0, 8.0]), np.array([3, 1]), 0.5)
        array([3., 4., 4., 8.])
    """
    if len(values) == len(lengths) or discount == 0.0:
        return values  # without a product: nothing times infinity is no number
    rows = min(_PIECE, int(lengths.max()))
    pieces = -(-lengths // rows)
    last_piece = np.cumsum(pieces) - 1
    filled = np.full(int(pieces.sum()), rows)
    filled[last_piece] = lengths - (pieces - 1) * rows
    is_there = np.arange(rows) < filled[:, None]
    # Pieces lie one behind the other, shorter ones filled up with nothing; sums run over columns of all pieces.
    summed = np.zeros((rows, len(filled)))
    if len(values) == summed.size:
        summed[:] = values.reshape(-1, rows).T
    else:
        summed.T[is_there] = values
    for row in range(rows - 2, -1, -1):
        summed[row] += discount * summed[row + 1]
    if len(filled) > len(lengths):
        from_first_rows = discounted_sums(summed[0].copy(), pieces, discount**rows)
        behind = np.append(from_first_rows[1:], 0.0)
        behind[last_piece] = 0.0
        steps_to_behind = np.arange(rows, 0, -1.0)
        summed += discount ** steps_to_behind[:, None] * behind
    found: Floats = summed.T.reshape(-1) if len(values) == summed.size else summed.T[is_there]
    return found


def sums_of_next(values: Floats, behind: npt.NDArray[np.int64], n: int, discount: float) -> Floats:
    """The sum of ``discount**k * values[t + k]`` over the next ``n`` rows, ``k`` from 0, within each episode.

    Sums of 2 rows are made of those of 1, sums of 4 of those of 2, and so on; the next 5 rows are the next one and the
    4 behind it. So 1,000 rows take 10 steps, and nothing is subtracted: what comes behind the next ``n`` rows does not
    show, not even an infinite one.

    With values 1, 2, 4, 8, 16 of one episode, 3 rows and a discount of 1: sums of 2 rows are 3, 6, 12, 24, 16, and of 3
    they are 1 + 6, 2 + 12, 4 + 24, 8 + 16, 16.

    Args:
        values: float64 ``[n]``, episode after episode.
        behind: How many rows of its episode come behind each row, int64 ``[n]``.
        n: How many rows, at least 1.
        discount: Of one step.

    Returns:
        float64 ``[n]``.

    Example:
        >>> import numpy as np
        >>> sums_of_next(np.array([1.0, 2.0, 4.0, 8.0]), np.array([2, 1, 0, 0]), 2, 0.5)
        array([2., 4., 4., 8.])
    """
    if discount == 0.0:
        return values  # without a product: nothing times infinity is no number
    left = min(n, int(behind.max(initial=0)) + 1)
    total, summed, rows, done = np.zeros(len(values)), values, 1, 0
    while left:
        if left & 1:
            (there,) = np.nonzero(behind >= done)
            total[there] += discount**done * summed[there + done]
            done += rows
        left >>= 1
        if left:
            (there,) = np.nonzero(behind >= rows)
            longer = summed.copy()
            longer[there] += discount**rows * summed[there + rows]
            summed, rows = longer, 2 * rows
    return total
