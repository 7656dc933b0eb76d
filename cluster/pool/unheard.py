"""Requests that came by the bus and have ended, until the ingress has said that it knows.

A call's reply says everything once more; what came by the bus has no reply, so its news have to be there for
the case that the connection breaks at its end. Knows nothing of what a request is.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

# an ingress that has not come back by then has given up its requests long ago
KEPT_S = 60.0

T = TypeVar("T")


class Unheard(Generic[T]):
    """By name, for `kept_s` at most.

    Args:
        on_forgotten: called with each that leaves, heard of or not.
    """

    def __init__(self, on_forgotten: Callable[[T], None], kept_s: float = KEPT_S) -> None:
        self._on_forgotten = on_forgotten
        self._kept_s = kept_s
        self._ended: dict[str, tuple[T, asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def __iter__(self) -> Iterator[T]:
        return (one for one, _ in self._ended.values())

    def add(self, name: str, one: T) -> None:
        timer = asyncio.get_running_loop().call_later(self._kept_s, self.forget, name)
        self._ended[name] = one, timer

    def forget(self, name: str) -> None:
        """The ingress knows, or has gone; an unknown name is no error."""
        found = self._ended.pop(name, None)
        if found is not None:
            one, timer = found
            timer.cancel()
            self._on_forgotten(one)

    def forget_where(self, condition: Callable[[T], bool]) -> None:
        for name in [name for name, (one, _) in self._ended.items() if condition(one)]:
            self.forget(name)
