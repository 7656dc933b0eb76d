"""The token bus over TLS: members talk, strangers and eavesdroppers do not."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hybridserve.cluster.access.bus_tls import listener_context, sender_context
from hybridserve.cluster.access.options import BusTls
from hybridserve.cluster.bus import frames
from hybridserve.cluster.bus.frames import Entry
from hybridserve.cluster.bus.listener import BusListener
from hybridserve.cluster.bus.sender import BusSender
from hybridserve.cluster.pool.engine_actor import EngineActor
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio

SECRET_TOKENS = tuple(range(70_000, 70_400))


class Wire:
    """Between the two ends: keeps all that passes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.seen = b""

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._target)
        halves = self._copy(reader, there[1]), self._copy(there[0], writer)
        # cancelled when the test ends
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*halves, return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.seen += data
                writer.write(data)
        finally:
            # however one end goes, the other hears of it
            writer.close()


@asynccontextmanager
async def bus(
    ingress: BusTls | None, engine: BusTls | None
) -> AsyncIterator[tuple[BusListener, BusSender, list[bytes]]]:
    cancelled: list[bytes] = []
    listener = BusListener("127.0.0.1", tls=ingress and listener_context(ingress))
    sender = BusSender(cancelled.append, lambda: None, tls=engine and sender_context(engine))
    await listener.start()
    try:
        yield listener, sender, cancelled
    finally:
        await sender.close()
        await listener.close()


async def send_over(
    listener: BusListener, sender: BusSender, cancelled: list[bytes], timeout_s: float
) -> tuple[EngineOutput, bytes]:
    """The news as they arrive, and what an eavesdropper saw; a cancel goes back. Raises TimeoutError."""
    stream = listener.open_stream()
    wire = Wire(stream.reply_to.port)
    channel = sender.open_stream(("127.0.0.1", await wire.start()))
    entry = Entry(stream.reply_to.key, 0, EngineOutput("", 0, SECRET_TOKENS))
    sender.send(channel, [frames.pack_entry(entry)])
    try:
        output = await asyncio.wait_for(stream.get(), timeout_s)
        listener.cancel(stream)
        while not cancelled:
            await asyncio.sleep(0.005)
        assert cancelled == [stream.reply_to.key]
        return output, wire.seen
    finally:
        sender.close_stream(channel)


async def test_members_talk_and_nobody_reads_along(new_authority) -> None:
    authority = new_authority("ours")
    readable = frames.pack_entry(Entry(b"k" * 16, 0, EngineOutput("", 0, SECRET_TOKENS)))[20:-20]
    async with bus(None, None) as ends:
        output, seen = await send_over(*ends, timeout_s=10)
        # the test sees what it looks for, where it is to be seen
        assert output.token_ids == SECRET_TOKENS and readable in seen
    members = BusTls(**authority.sign("ingress")), BusTls(**authority.sign("engine"))
    async with bus(*members) as ends:
        output, seen = await send_over(*ends, timeout_s=10)
        assert output.token_ids == SECRET_TOKENS and readable not in seen and len(seen) > len(readable)


@pytest.mark.parametrize("stranger", ["ingress", "engine", "plain engine", "plain ingress"])
async def test_strangers_get_nothing(
    new_authority: Callable, stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = new_authority("ours"), new_authority("theirs")
    member = BusTls(**ours.sign("member"))
    # a certificate of another authority, but it knows ours
    outside = BusTls(**{**theirs.sign("stranger"), "cafile": ours.cafile})
    ingress, engine = {
        "ingress": (outside, member),
        "engine": (member, outside),
        "plain engine": (member, None),
        "plain ingress": (None, member),
    }[stranger]
    async with bus(ingress, engine) as ends:
        listener, sender, _ = ends
        stream = listener.open_stream()
        channel = sender.open_stream(stream.reply_to.address)
        sender.send(channel, [frames.pack_entry(Entry(stream.reply_to.key, 0, EngineOutput("", 0, (1,))))])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.get(), 1.0)
        assert listener.loads == []
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    # a few, as nobody dials in a tight loop; half a configuration in the clear just waits for the handshake
    assert ("plain" in stranger or lines) and len(lines) <= 20
    assert all(line.startswith("token bus: ") for line in lines)


async def test_files_that_cannot_be_used_are_named(new_authority: Callable, tmp_path: Path) -> None:
    files = new_authority("ours").sign("member")
    other = new_authority("other").sign("member")
    for name, changed in (
        ("certfile", {"certfile": str(tmp_path / "none.pem")}),
        ("keyfile", {"keyfile": other["keyfile"]}),
        ("cafile", {"cafile": str(tmp_path / "none.pem")}),
    ):
        with pytest.raises(ValueError, match=f"access.bus_tls: .*{name}.*{Path(changed[name]).name}"):
            sender_context(BusTls(**{**files, **changed}))


async def test_old_versions_of_tls_are_refused(new_authority: Callable) -> None:
    tls = BusTls(**new_authority("ours").sign("member"))
    for context in (listener_context(tls), sender_context(tls)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED


async def test_the_bus_listens_on_the_address_it_was_given_alone() -> None:
    """127.0.0.2 is this machine too, and whoever listens on all addresses answers there."""
    async with bus(None, None) as (listener, _, _):
        port = listener.open_stream().reply_to.port
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)


async def test_an_engines_tokens_come_over_tls(new_authority: Callable, fake_factory: Callable) -> None:
    authority = new_authority("ours")
    ingress, engine = BusTls(**authority.sign("ingress")), BusTls(**authority.sign("engine"))
    listener = BusListener("127.0.0.1", tls=listener_context(ingress))
    await listener.start()
    actor = EngineActor(fake_factory(), bus_tls=engine)
    assert isinstance(await actor.start("r1"), EngineInfo)
    stream = listener.open_stream()
    asked = GenerationRequest("x", (5,), SamplingParams(max_tokens=8))
    call = asyncio.create_task(actor.generate(asked, stream.reply_to))
    tokens: list[int] = []
    while len(tokens) < 8:
        tokens += (await asyncio.wait_for(stream.get(), 30)).token_ids
    assert tokens == list(range(5, 13)) == list((await call).output.token_ids)
    await actor.close()
    await listener.close()


async def test_an_engine_whose_certificates_cannot_be_used_does_not_start(
    new_authority: Callable, fake_factory: Callable
) -> None:
    files = new_authority("ours").sign("engine")
    actor = EngineActor(fake_factory(), bus_tls=BusTls(**{**files, "cafile": "/nowhere.pem"}))
    assert "cafile /nowhere.pem cannot be used" in str(await actor.start())
