"""What a rank knows of the memory it shares with its peers, and how that memory is laid out.

Knows nothing of how memory is shared between processes; `parallel/peer_memory.py` does that.
"""

from dataclasses import dataclass

import torch

MAX_PROGRAMS = 160
"""Programs of a launch at most. All of them must run at once on every rank, as they wait for each other."""
WORD_BYTES = 4
"""Of a message, that travel together with their call's number as 8."""


def signal_bytes(world_size: int) -> int:
    """Bytes of a rank's signals: for each program a word from each rank and each of the two barriers."""
    return MAX_PROGRAMS * 2 * world_size * 4


@dataclass(frozen=True)
class Slots:
    """Memory into which the other ranks write messages, as words that bear their call's number.

    slots: int64 [world_size] on the device, where each rank's slots lie: int64 [2, world_size, max_words],
        zero at first, and touched by nothing but these messages, lest other bytes pass for a word's number.
        Calls take the halves in turn, and rank r writes slot r of every other rank.
    calls: int32 [2] on the device, zero at first: how many calls this rank has made, and how many programs of
        the present one have read that.
    max_words: words of the longest message, a multiple of 4.
    """

    slots: torch.Tensor
    calls: torch.Tensor
    max_words: int

    def takes(self, rows: int, width: int, itemsize: int) -> bool:
        """Whether a message fits; a word never holds numbers of two rows."""
        return itemsize in (2, 4) and 0 < rows * -(-width * itemsize // WORD_BYTES) <= self.max_words


def slot_bytes(world_size: int, max_words: int) -> int:
    """Bytes of a rank's slots."""
    return 2 * world_size * max_words * 2 * WORD_BYTES


@dataclass(frozen=True)
class PeerMemory:
    """One rank's view.

    buffers: int64 [world_size] on the device, the address of each rank's buffer, its own among them. It has
        two halves, which calls take in turn: a rank that is one call ahead then writes what no slower rank
        still reads, and one barrier a call suffices. A program that comes to a call's barrier has all of
        the rank's earlier calls behind it, so every program takes part in every call.
    signals: int64 [world_size] on the device, where each rank's signals lie, int32 [MAX_PROGRAMS, 2,
        world_size], zero at first: word [p, b, r] counts the calls in which program p of rank r came
        to barrier b.
    calls: int32 [MAX_PROGRAMS] on the device, zero at first: how many calls a program of this rank has made;
        in memory and no argument, so that a CUDA graph may hold any number of calls.
    half_bytes: bytes of one half of a buffer, a multiple of 16.
    given_up: where an int32 of this rank lies; while it is not 0, nobody is waited for.
    slots: for the shortest messages.
    programs: of a launch that has barriers, the same on all ranks.
    """

    rank: int
    world_size: int
    buffers: torch.Tensor
    signals: torch.Tensor
    calls: torch.Tensor
    half_bytes: int
    given_up: int
    slots: Slots
    programs: int = MAX_PROGRAMS
