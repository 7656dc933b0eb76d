"""How rank 0 tells the other ranks of a replica what to do, one message a step; two ways with one face.

Knows nothing of what a message says.
"""

import queue
import threading
from typing import Protocol

import torch
import torch.distributed as dist

from hybridserve.parallel.step_channel.board import Board, MemoryBoard, StoreBoard
from hybridserve.parallel.step_channel.memory import SharedMemory
from hybridserve.parallel.step_channel.ring import RingReader, RingWriter, ring_bytes

SEND_TIMEOUT_S = 30.0
FIRST_BYTES = 16 * 2**10
"""What a broadcast between hosts carries at once; few steps need a second one."""
_LENGTH_BYTES = 8


class StepChannel(Protocol):
    board: Board

    def announce(self) -> None:
        """Rank 0: a message follows at once. Wakes who waits for it, which takes longer than to send it."""

    def send(self, message: bytes) -> None:
        """Rank 0: hand `message`, not empty, to all others; they receive it in order.

        Raises:
            TimeoutError: a rank does not take what is sent; names it.
            RuntimeError: a rank is gone.
        """

    def receive(self, timeout_s: float) -> bytes | None:
        """Another rank: the next message; None when `timeout_s` seconds pass without one.

        Raises:
            RuntimeError: rank 0 is gone.
        """

    def close(self) -> None: ...


def memory_bytes(size: int) -> int:
    """Of the shared memory of a `MemoryChannel` of `size` ranks."""
    return size * MemoryBoard.ROW_WORDS * 4 + ring_bytes(size)


class MemoryChannel:
    """Between ranks of one host."""

    def __init__(self, memory: SharedMemory, rank: int, size: int) -> None:
        """memory: `memory_bytes(size)` bytes that all ranks have."""
        self._memory = memory
        board_bytes = size * MemoryBoard.ROW_WORDS * 4
        self._board_view = memory.view[:board_bytes]
        self._words = self._board_view.cast("I")
        self.board = MemoryBoard(self._words, rank, size)
        self._ring_view = memory.view[board_bytes:]
        self._ring = RingReader(self._ring_view, rank, size) if rank else RingWriter(self._ring_view, size)

    def announce(self) -> None:
        self._ring.announce()

    def send(self, message: bytes) -> None:
        self._ring.write(message, SEND_TIMEOUT_S)

    def receive(self, timeout_s: float) -> bytes | None:
        return self._ring.read(timeout_s)

    def close(self) -> None:
        """Nobody may use the board any more."""
        self._ring.release()
        for view in (self._ring_view, self._words, self._board_view):
            view.release()
        self._memory.close()


class GroupChannel:
    """Between ranks of several hosts: broadcasts of a CPU process group."""

    def __init__(self, backend: dist.Backend, store: dist.Store, rank: int, size: int) -> None:
        """backend: gloo's, of these ranks, used by this channel alone and with no timeout that counts."""
        self.board = StoreBoard(store, rank, size)
        self._backend = backend
        self._received: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        if rank:
            # a broadcast cannot be waited for in part
            threading.Thread(target=self._receive_all, name="step channel", daemon=True).start()

    def announce(self) -> None:
        """The others wait in a broadcast, which nothing but its data ends."""

    def send(self, message: bytes) -> None:
        self._broadcast(_framed(message))

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            got = self._received.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(got, Exception):
            raise RuntimeError("rank 0 is gone from the step channel") from got
        return got

    def close(self) -> None:
        self._backend.shutdown()

    def _broadcast(self, framed: torch.Tensor) -> None:
        self._backend.broadcast(framed[:FIRST_BYTES], 0).wait()
        if len(framed) > FIRST_BYTES:
            self._backend.broadcast(framed[FIRST_BYTES:], 0).wait()

    def _receive_all(self) -> None:
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        while True:
            try:
                self._backend.broadcast(first, 0).wait()
                length = int.from_bytes(first[:_LENGTH_BYTES].numpy().tobytes(), "little")
                message = first[_LENGTH_BYTES:][:length].numpy().tobytes()
                if len(message) < length:
                    rest = torch.empty(length - len(message), dtype=torch.uint8)
                    self._backend.broadcast(rest, 0).wait()
                    message += rest.numpy().tobytes()
            except RuntimeError as error:
                self._received.put(error)
                return
            self._received.put(message)


def _framed(message: bytes) -> torch.Tensor:
    """uint8, at least `FIRST_BYTES`: the message's length, the message, and nothing."""
    size = max(_LENGTH_BYTES + len(message), FIRST_BYTES)
    framed = torch.zeros(size, dtype=torch.uint8)
    whole = len(message).to_bytes(_LENGTH_BYTES, "little") + message
    framed[: len(whole)] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    return framed
