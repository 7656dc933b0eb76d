"""Sums over the GPUs of one node by reading each other's memory, for messages too small for a ring."""

from hybridserve.kernels.all_reduce.peers import (
    MAX_PROGRAMS,
    WORD_BYTES,
    PeerMemory,
    Slots,
    signal_bytes,
    slot_bytes,
)

__all__ = ["MAX_PROGRAMS", "WORD_BYTES", "PeerMemory", "Slots", "signal_bytes", "slot_bytes"]
