"""Noticing that a client has gone, while its answer is still being made."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]
) -> T:
    """The result of `work`, which has ended, cancelled if need be, when this returns or raises.

    receive: of a request whose body has been read. others: return when the client must be taken for gone.

    Raises:
        ClientGone: the client disconnected first.
    """
    task = asyncio.ensure_future(work)
    watchers = [asyncio.ensure_future(one) for one in (_disconnected(receive), *others)]
    try:
        await asyncio.wait((task, *watchers), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(task, *watchers, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
