"""A store whose calls end: what a rank does with it, within limits of time.

A store answers from the process that hosts it, and a client waits for the answer without a limit: where that
process is stopped, or its host cannot be reached, for ever. So a thread of its own asks, and who wants the
answer waits for as long as it may.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# What a call gets at least, however little is left of a wait: after its end others have still to be told.
LEAST_S = 1.0


class StoreSilent(RuntimeError):  # noqa: N818 - it names a state
    """The store has not answered in time; it is not asked again."""


class Line:
    """The way to a store.

    Args:
        seconds: how long a call may take outside of ``within``, at least LEAST_S.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self.store = store
        self._seconds, self._end = seconds, float("inf")
        self._silent = False
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._started = False
        # The thread ends with the line; until then it waits for requests.
        weakref.finalize(self, self._requests.put, None).atexit = False

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Calls inside end so many seconds from now, or LEAST_S after they began if that is later."""
        before, self._end = self._end, time.monotonic() + seconds
        try:
            yield
        finally:
            self._end = before

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._silent:
            raise StoreSilent("the store did not answer an earlier call")
        if not self._started:
            self._started = True
            Thread(target=_serve, args=(self._requests,), name="dg_core store", daemon=True).start()
        answers: SimpleQueue[Any] = (
            SimpleQueue()
        )  # one a call, so an interrupted one leaves nothing to the next
        self._requests.put((function, arguments, answers))
        limit = max(LEAST_S, min(self._seconds, self._end - time.monotonic()))
        try:
            value, error = answers.get(timeout=limit)
        except Empty:
            self._silent = True
            raise StoreSilent(f"the store has not answered for {limit:.3g} s") from None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which would hold this frame, and that the line
        return value

    # The calls of a store that ranks make ------------------------------------------------------------------

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(self.store.add, key, amount))

    def set(self, key: str, value: bytes | str) -> None:
        self._ask(self.store.set, key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._ask(self.store.get, key)
        return found

    def check(self, key: str) -> bool:
        return bool(self._ask(self.store.check, [key]))

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        found: bytes = self._ask(self.store.compare_set, key, expected, wanted)
        return found

    def delete_key(self, key: str) -> None:
        self._ask(self.store.delete_key, key)


def _serve(requests: SimpleQueue[Any]) -> None:
    while True:
        request = requests.get()
        if request is None:
            return
        function, arguments, answers = request
        try:
            answers.put((function(*arguments), None))
        except BaseException as error:
            answers.put((None, error))
        # Nothing of the last request is kept while the thread waits for the next.
        del request, function, arguments, answers
