"""What a rank knows of the memory it shares with its peers: where each one's buffer and signals lie.

Owns the layout of both. Knows nothing of how memory is shared between processes; `parallel/peer_memory.py`
does that.
"""

from dataclasses import dataclass

import torch

MAX_PROGRAMS = 64
"""Programs of every launch: all of them must run at once on every rank, since they wait for each other."""
GIVEN_UP = 0x3F
"""Every byte of a rank's signals once its waiting is to end: later than any call there will be."""


def signal_bytes(world_size: int) -> int:
    """Bytes of a rank's signals: for each program a word from each rank and each of the two barriers."""
    return MAX_PROGRAMS * 2 * world_size * 4


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
    """

    rank: int
    world_size: int
    buffers: torch.Tensor
    signals: torch.Tensor
    calls: torch.Tensor
    half_bytes: int
