"""Messages from one process to several others through shared memory, every one read by all.

A ring of slots. The writer counts the slots it has filled, each reader the slots it has read; the writer
waits where a slot is not read by all. A message that is longer than a slot takes several. A slot has a
number, and a checksum: in which order another core sees what was written is not for Python to say, so a slot
is taken only when it fits.
"""

import os
import struct
import time
import zlib

from hybridserve.parallel.step_channel.futex import Futex

SLOT_BYTES = 64 * 2**10
NUM_SLOTS = 16
SPIN_S = 20e-6
"""A reader looks again for so long before it sleeps: longer would take a core from who writes."""
AWAKE_S = 300e-6
"""And for so long after it was woken: the writer wakes it before the message is there."""
_LINE_WORDS = 16
"""Counters lie in cache lines of their own."""
_HEADER_BYTES = 64
_HEADER = struct.Struct("@IIII")
"""A slot's number, the bytes in it, whether the message goes on in the next one, a checksum of it all."""
_NAP_S = 50e-6
_TORN_S = 1.0


def ring_bytes(size: int) -> int:
    """Bytes of memory for a ring of `size` ranks."""
    return (1 + size) * _LINE_WORDS * 4 + NUM_SLOTS * (_HEADER_BYTES + SLOT_BYTES)


class _Ring:
    def __init__(self, memory: memoryview, size: int) -> None:
        """memory: `ring_bytes(size)` bytes, zeroed when they were made."""
        self._memory = memory
        self._first_slot = (1 + size) * _LINE_WORDS * 4
        # a whole word is stored at once, as a native one is
        self._counters = memory[: self._first_slot].cast("I")
        self._futex = Futex(memory, 0)
        self._size = size
        self._count = 0

    def release(self) -> None:
        """Let go of the memory."""
        self._futex.release()
        self._counters.release()

    def _slot(self) -> int:
        """Where the next slot begins."""
        return self._first_slot + self._count % NUM_SLOTS * (_HEADER_BYTES + SLOT_BYTES)

    def _read_by(self, rank: int) -> int:
        return (1 + rank) * _LINE_WORDS


class RingWriter(_Ring):
    """Rank 0's end."""

    def announce(self) -> None:
        """Wake the readers: a message will be there before they have come to their senses."""
        self._futex.wake()

    def write(self, message: bytes, timeout_s: float) -> None:
        """Hand `message` to all others.

        Raises:
            TimeoutError: a rank has not read what was written `timeout_s` seconds ago; names it. The ring
                cannot be used any more.
        """
        for start in range(0, max(len(message), 1), SLOT_BYTES):
            part = message[start : start + SLOT_BYTES]
            self._wait_for_room(timeout_s)
            at = self._slot()
            body = at + _HEADER_BYTES
            self._count += 1
            number, more = self._count % 2**32, start + SLOT_BYTES < len(message)
            self._memory[body : body + len(part)] = part
            _HEADER.pack_into(self._memory, at, number, len(part), more, _checksum(part, number, more))
            self._counters[0] = number
            self._futex.wake()

    def _wait_for_room(self, timeout_s: float) -> None:
        deadline = None
        for rank in range(1, self._size):
            while (self._count - self._counters[self._read_by(rank)]) % 2**32 >= NUM_SLOTS:
                deadline = deadline or time.monotonic() + timeout_s
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} has read nothing for {timeout_s:g} s")
                time.sleep(_NAP_S)


class RingReader(_Ring):
    """The end of one rank above 0."""

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        super().__init__(memory, size)
        self._mine = self._read_by(rank)
        self._parts: list[bytes] = []

    def read(self, timeout_s: float) -> bytes | None:
        """The next message; None when `timeout_s` seconds pass without one."""
        deadline = time.monotonic() + timeout_s
        while self._wait(deadline):
            part, more = self._take()
            if not more and not self._parts:
                return part
            self._parts.append(part)
            if not more:
                message, self._parts = b"".join(self._parts), []
                return message
        return None

    def _wait(self, deadline: float) -> bool:
        counters, seen = self._counters, self._count % 2**32
        spin_until = time.monotonic() + SPIN_S
        while counters[0] == seen:
            now = time.monotonic()
            if now >= deadline:
                return False
            if now < spin_until:
                os.sched_yield()
            else:
                self._futex.wait(seen, deadline - now)
                spin_until = time.monotonic() + AWAKE_S
        return True

    def _take(self) -> tuple[bytes, int]:
        at = self._slot()
        body = at + _HEADER_BYTES
        self._count += 1
        number = self._count % 2**32
        deadline = None
        while True:
            found, length, more, checksum = _HEADER.unpack_from(self._memory, at)
            if found == number and length <= SLOT_BYTES:
                part = bytes(self._memory[body : body + length])
                if checksum == _checksum(part, number, more):
                    break
            deadline = deadline or time.monotonic() + _TORN_S
            if time.monotonic() > deadline:
                raise RuntimeError(f"message {number} of the step channel does not arrive whole")
        self._counters[self._mine] = number
        return part, more


def _checksum(part: bytes, number: int, more: int) -> int:
    return zlib.crc32(part, (2 * number + more) % 2**32)
