"""Requests of several threads that are served together, as they share what is slow about each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mouse_core._base.locks import ProcessLock


@dataclass(slots=True, eq=False)
class _Request:
    given: Any
    answer: Any = None
    error: BaseException | None = None
    served: bool = False


class Requests:
    """Serves what threads ask for at the same time in one call."""

    def __init__(self) -> None:
        self._queue: list[_Request] = []
        self._guard = ProcessLock()
        self._turn = ProcessLock()

    def serve(self, given: Any, handle: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """The answer to one request.

        Args:
            given: What is asked for.
            handle: From several requests to their answers. If it fails for several, each is tried alone, so that an
                error reaches whom it is about.

        Raises:
            Exception: What ``handle`` raised. What interrupts this thread, such as KeyboardInterrupt, is raised here
                alone; the others that were to be served serve themselves.
        """
        request = _Request(given)
        with self._guard:
            self._queue.append(request)
        # Whoever comes first serves all that have come until then; the others find themselves served.
        with self._turn:
            if not request.served:
                with self._guard:
                    requests, self._queue = self._queue, []
                if request not in requests:
                    requests.insert(0, request)  # whoever took it was interrupted, by Ctrl-C perhaps
                self._serve(requests, handle)
        if request.error is not None:
            raise request.error
        return request.answer

    def _serve(self, requests: list[_Request], handle: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        if len(requests) > 1:
            try:
                answers = handle([request.given for request in requests])
            except Exception:
                answers = None
            if answers is not None:
                for request, answer in zip(requests, answers, strict=True):
                    request.answer, request.served = answer, True
                return
        for request in requests:
            try:
                (request.answer,) = handle([request.given])
            except Exception as error:
                request.error = error
            request.served = True
