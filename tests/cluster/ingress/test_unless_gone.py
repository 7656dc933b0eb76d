"""Work for a client ends with the client, or with whoever waits for it, and not before it has cleaned up."""

import asyncio

import pytest

from hybridserve.cluster.ingress.disconnect import ClientGone, unless_gone


async def stays() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def leaves() -> dict[str, str]:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


async def work(log: list[str], seconds: float) -> str:
    try:
        await asyncio.sleep(seconds)
        return "done"
    finally:
        await asyncio.sleep(0)
        log.append("cleaned up")


def test_the_result_comes_through():
    assert asyncio.run(unless_gone(stays, work([], 0.0))) == "done"


def test_a_failure_comes_through():
    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(unless_gone(stays, fails()))


def test_a_client_that_leaves_ends_the_work():
    log: list[str] = []

    async def go() -> None:
        with pytest.raises(ClientGone):
            await unless_gone(leaves, work(log, 60.0))
        assert log == ["cleaned up"]

    asyncio.run(go())


def test_cancelling_the_request_ends_the_work():
    log: list[str] = []

    async def go() -> None:
        task = asyncio.create_task(unless_gone(stays, work(log, 60.0)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["cleaned up"]

    asyncio.run(go())
