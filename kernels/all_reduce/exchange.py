"""What a rank knows of the memory into which the others copy their parts of long messages.

Owns its layout. Knows nothing of how it is shared between processes, nor of who copies:
`parallel/exchange.py` does both.
"""

from dataclasses import dataclass

import torch

SLOTS = 4
"""Messages that can be there at once: see `parallel/exchange.py` for why so many suffice."""


def slot_offset(slot: int, sender: int, receiver: int, world_size: int, piece_bytes: int) -> int:
    """Where in the receiver's memory the sender's part of a message lies, in bytes: [SLOTS, world_size - 1]
    parts, for nobody sends to itself."""
    place = sender - (sender > receiver)
    return (slot * (world_size - 1) + place) * piece_bytes


def flag_offset(slot: int, sender: int, world_size: int, piece_bytes: int) -> int:
    """Where in the receiver's memory the number of the sender's last call in a slot lies, behind all parts:
    int32 [SLOTS, world_size], and then the word that ends all waiting."""
    return SLOTS * ((world_size - 1) * piece_bytes) + (slot * world_size + sender) * 4


def exchange_bytes(world_size: int, piece_bytes: int) -> int:
    """Bytes of a rank's memory."""
    return flag_offset(SLOTS, 0, world_size, piece_bytes) + 4


@dataclass(frozen=True)
class ExchangeMemory:
    """One rank's view of its own memory.

    own: int64 [3] on the device, the addresses of the parts, of the flags, and of the word that ends all
        waiting once it is not 0.
    piece_bytes: of a part at most, a multiple of 16.
    """

    rank: int
    world_size: int
    own: torch.Tensor
    piece_bytes: int
