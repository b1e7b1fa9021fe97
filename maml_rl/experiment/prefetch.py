"""Work done ahead of time: a thread makes items while another uses earlier ones, through a queue of bounded length."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from maml_rl.arguments import check_count

Item = TypeVar("Item")

# Seconds that the current work may take to end before it is interrupted.
_GRACE_SECONDS = 1.0
_PAUSE_SECONDS = 0.5


class Prefetcher(Generic[Item]):
    """Makes `count` items in its own thread, each at most `ahead` places ahead of the one in use.

    The end of the `with` block, for any reason, ends the thread. An error of the thread is raised by `take`, once the
    items made before are taken.

    Args:
        make: makes the next item.
        count: of items.
        ahead: how many items may be finished or in progress and not yet taken, at least 1.
        interrupt: makes `make` end with an error, at once or soon, as its keyword argument `now` says.
    """

    def __init__(self, make: Callable[[], Item], count: int, ahead: int, interrupt: Callable[..., None]) -> None:
        self._make, self._count, self._ahead = make, count, check_count("ahead", ahead)
        self._interrupt = interrupt
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._failure: BaseException | None = None
        # A daemon, so that not even an environment that hangs in this process can keep it alive.
        self._thread = threading.Thread(target=self._run, name="maml_rl-prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._interrupt(now=False)
        self._thread.join(_GRACE_SECONDS)
        while self._thread.is_alive():
            self._interrupt(now=True)
            self._thread.join(_PAUSE_SECONDS)

    def take(self) -> Item:
        """Wait for the next item, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._failure)
            if not self._items:
                assert self._failure is not None
                raise self._failure
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def _run(self) -> None:
        try:
            for _ in range(self._count):
                with self._changed:
                    # Only when there is room: what an item needs exists once the one `ahead` places before is taken.
                    self._changed.wait_for(lambda: self._stopped or len(self._items) < self._ahead)
                    if self._stopped:
                        raise RuntimeError("nothing is made any more, because the block is over")
                item = self._make()
                with self._changed:
                    self._items.append(item)
                    self._changed.notify_all()
            # A request for more would wait forever.
            raise RuntimeError(f"all {self._count} items are taken")
        # Every error is raised in the thread that takes the items.
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
