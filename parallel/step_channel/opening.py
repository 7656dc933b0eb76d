"""Opening a step channel: shared memory where all ranks can have it, a process group where they cannot."""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from hybridserve.parallel.group import connect
from hybridserve.parallel.rendezvous import wait_for_keys
from hybridserve.parallel.step_channel.channel import (
    GroupChannel,
    MemoryChannel,
    StepChannel,
    memory_bytes,
)
from hybridserve.parallel.step_channel.memory import SharedMemory, host_identity

_NO_TIMEOUT_S = timedelta(days=365).total_seconds()
"""An engine may be idle for as long; who is gone is noticed by its silence."""


def open_channel(
    store: dist.Store,
    rank: int,
    size: int,
    check: Callable[[], None] = lambda: None,
    address: str | None = None,
) -> StepChannel:
    """Meet the other ranks on `store` and open this rank's end; returns when all have.

    check: called while others are waited for, and may raise. address: of this machine, for a group between
    hosts; by default what its name resolves to.
    """
    if rank == 0:
        return _open_first(store, size, check, address)
    return _open_other(store, rank, size, check, address)


def _open_first(store: dist.Store, size: int, check: Callable[[], None], address: str | None) -> StepChannel:
    host = host_identity()
    memory = SharedMemory.create(memory_bytes(size)) if host else None
    store.set("channel/memory", f"{host}\n{memory.address}" if memory else "")
    try:
        answers = wait_for_keys(store, [f"channel/has_memory/{rank}" for rank in range(1, size)], check)
    except BaseException:
        if memory is not None:
            memory.close()
        raise
    shared = memory is not None and all(answer == b"yes" for answer in answers)
    store.set("channel/kind", "memory" if shared else "group")
    if shared:
        return MemoryChannel(memory, 0, size)
    if memory is not None:
        memory.close()
    return _group_channel(store, 0, size, address)


def _open_other(
    store: dist.Store, rank: int, size: int, check: Callable[[], None], address: str | None
) -> StepChannel:
    (offer,) = wait_for_keys(store, ["channel/memory"], check)
    host, _, found_at = offer.decode().partition("\n")
    memory = None
    if host and host == host_identity():
        try:
            memory = SharedMemory.attach(found_at)
        except OSError:
            # one host may still keep its processes apart; the group serves them as well
            memory = None
    store.set(f"channel/has_memory/{rank}", "yes" if memory else "no")
    (kind,) = wait_for_keys(store, ["channel/kind"], check)
    if kind == b"memory":
        return MemoryChannel(memory, rank, size)
    if memory is not None:
        memory.close()
    return _group_channel(store, rank, size, address)


def _group_channel(store: dist.Store, rank: int, size: int, address: str | None) -> GroupChannel:
    prefixed = dist.PrefixStore("channel/group", store)
    group = connect(rank, size, prefixed, timeout_s=_NO_TIMEOUT_S, address=address)
    return GroupChannel(group.backend, store, rank, size)
