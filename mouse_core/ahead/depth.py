"""How far ahead pages are asked for: as far as it takes for them to be there when they are read, and no further."""

from __future__ import annotations

LEAST, FIRST, MOST = 1 << 20, 4 << 20, 64 << 20
"""Bytes that are asked for ahead: at least, at first, and at most."""

# Of what there is room for in memory pages that were asked for may take one part in so many, lest they go again before
# they are read.
_PART = 16
# Waiting for so much of the time is as good as not waiting.
_CALM = 0.04
# So many times less waiting than before is less, and so many times more is more: what is measured varies by itself.
_LESS, _MORE = 0.8, 1.25


class Depth:
    """How many bytes are asked for ahead, found by how long batches wait for pages all the same.

    A batch waits where its pages have not come yet, for which more depth helps, or have gone again, for which less
    does; or where the disk gives no more, whatever the depth. Nobody says which of them it is, so it goes one step,
    twice or half as far, and looks: on where that helped, back where it harmed, and towards where it began where it
    made no difference, as a disk that keeps up has slow reads, too; from there the one way and the other. Where hardly
    anybody waits it stays as it is.

    Args:
        room: Bytes of files that there is room for in memory; None: nobody says.
    """

    def __init__(self, room: int | None = None) -> None:
        self.most = MOST if room is None else max(LEAST, min(MOST, room // _PART))
        self.nbytes = min(FIRST, self.most)
        self._first, self._out = self.nbytes, 0.5
        self._step, self._before = 2.0, 0.0

    def saw(self, batches: int, waited: float, seconds: float) -> None:
        """So many batches were copied in some seconds, of which they waited for pages so many."""
        if not batches or waited <= _CALM * seconds:
            self._before = 0.0
            return
        each, before = waited / batches, self._before
        if before and each > _MORE * before:
            self._step = 1 / self._step
        elif before and each > _LESS * before:
            if self.nbytes == self._first:  # the other way than last time
                self._out = self._step = 1 / self._out
            else:
                self._step = 0.5 if self.nbytes > self._first else 2.0
        self._before = each
        self.nbytes = min(max(int(self.nbytes * self._step), LEAST), self.most)
