"""The ranks of one replica, and the collectives between them.

Owns the process group object that layers are given. Knows nothing of layers, of models or of who starts
the processes: the caller hands over a `Store` on which the ranks meet, so that no address is fixed here.
"""

import atexit
import logging
import os
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridserve.parallel.exchange import PeerExchange, open_exchange
from hybridserve.parallel.peer_memory import Unreachable
from hybridserve.parallel.peer_sums import PeerAllReduce, open_peers

logger = logging.getLogger(__name__)

BACKENDS = ("gloo", "nccl")
TIMEOUT_S = {"gloo": 60.0, "nccl": 600.0}
"""Of a collective. NCCL's ends the process, and a rank may wait for one that still reads its weights."""
FORCED_SWITCHES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Set in every rank before it connects GPUs: NVLink multicast is never used."""
_ABORT_S = 5.0


@dataclass(frozen=True)
class TensorParallelGroup:
    """One shard's place in its replica. With `size` 1 every collective returns its argument."""

    rank: int
    size: int
    backend: dist.Backend | None = None
    """The connected backend; None only with `size` 1."""
    peers: PeerAllReduce | None = None
    """Sums small messages by reading the other ranks' memory, where that can be done."""
    why_no_peers: str = "the ranks share no memory"
    exchange: PeerExchange | None = None
    """Sums long messages while the rank computes, where that can be done."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(
                f"tp_rank must be in [0, tp_size), got tp_rank {self.rank} and tp_size {self.size}"
            )
        if self.size > 1 and self.backend is None:
            raise ValueError(f"tp_size {self.size} needs a connected backend")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks; returns the sum, which may lie in `x`."""
        if self.size == 1:
            return x
        if x.numel() > 0 and self.reads_peers(x.numel() // x.shape[-1], x.shape[-1], x.dtype):
            return self.peers.all_reduce(x)
        x = x.contiguous()
        self.backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Join the ranks' equally shaped `x` along `dim`, in the order of the ranks."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.backend.allgather([parts], [x]).wait()
        return torch.cat(parts, dim)

    def reads_peers(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Whether a message [rows, width] is summed by reading the other ranks' memory."""
        return self.peers is not None and self.peers.takes(rows, width, dtype)

    @property
    def shared_bytes(self) -> int:
        """Of this rank's memory that the others reach, outside of what torch allocates."""
        return sum(one.shared_bytes for one in (self.peers, self.exchange) if one is not None)

    def abort(self) -> None:
        """End collectives that wait for a rank that is gone; callable from any thread. They raise, or return
        what means nothing, and the group cannot be used any more."""
        # gloo's end by themselves when a connection breaks
        if dist.is_nccl_available() and isinstance(self.backend, dist.ProcessGroupNCCL):
            # ends them at once, but comes back only when no CUDA graph holds any of the group's
            thread = threading.Thread(target=_abort, args=(self.backend,), name="nccl abort", daemon=True)
            thread.start()
            # a process that ends beneath it would be ended by the C++ runtime, not by its exit code
            atexit.register(thread.join, _ABORT_S)
        for one in (self.peers, self.exchange):
            if one is None:
                continue
            try:
                one.abort()
            except (Unreachable, RuntimeError) as error:
                logger.warning("waiting for the other ranks could not be ended: %s", error)

    def close(self) -> None:
        """Free the memory that this rank shares with others, and unmap theirs, which would else be kept as
        long as this process lives. May be called again, and `abort` after it.

        The caller sees to it that nobody uses that memory any more: what this rank has launched has ended (a
        device synchronise behind the last call), no graph that holds collectives of the group is launched
        again, and the other ranks' processes have ended. One that lived on could still read this rank's
        memory, or write its part there, when this rank has long been done, and all could only close at once
        after they had told each other that they are. So a rank whose process ends with it closes nothing.
        """
        for one in (self.peers, self.exchange):
            if one is not None:
                one.close()


SINGLE = TensorParallelGroup(rank=0, size=1)


def _abort(backend: dist.Backend) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        logger.warning("NCCL could not be ended: %s", error)


def connect(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    backend: str = "gloo",
    timeout_s: float | None = None,
    address: str | None = None,
    overlapped_bytes: int = 0,
) -> TensorParallelGroup:
    """Meet the other ranks on `store` and return this rank's group.

    The group is not registered as torch's default one: two replicas' groups can live in one process. gloo
    listens on `address`, by default on what the host's name resolves to. timeout_s: None for the backend's of
    `TIMEOUT_S`. With nccl the current device is the rank's, and ranks that reach each other's memory share
    some (see `peer_sums`), unless the environment has NCCL_P2P_DISABLE=1. overlapped_bytes: of the longest
    message whose sum is begun and ended later (see `exchange`); 0 for none.

    Raises:
        ValueError: `backend` is neither gloo nor nccl, or `rank` is not in [0, size).
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if size == 1:
        return TensorParallelGroup(rank, size)
    timeout = timedelta(seconds=TIMEOUT_S[backend] if timeout_s is None else timeout_s)
    if backend == "gloo":
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        if address is None:
            gloo._devices = [dist.ProcessGroupGloo.create_default_device()]
        else:
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return TensorParallelGroup(rank, size, dist.ProcessGroupGloo(store, rank, size, gloo))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    force_switches(os.environ)
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    shared, reason = _share_memory(rank, size, store)
    exchange = _open_exchange(rank, size, store, overlapped_bytes) if shared is not None else None
    return TensorParallelGroup(rank, size, group, shared, reason, exchange)


def force_switches(environ: MutableMapping[str, str]) -> None:
    """Write `FORCED_SWITCHES` into `environ`, whatever it says."""
    environ.update(FORCED_SWITCHES)


def _share_memory(rank: int, size: int, store: dist.Store) -> tuple[PeerAllReduce | None, str]:
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        peers, reason = None, "NCCL_P2P_DISABLE is 1"
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        peers, reason = open_peers(rank, size, dist.PrefixStore("peer_memory", store), device)
    if rank == 0:
        how = "by reading each other's memory" if peers is not None else f"by NCCL: {reason}"
        logger.info("small messages are summed %s", how)
    return peers, reason


def _open_exchange(rank: int, size: int, store: dist.Store, piece_bytes: int) -> PeerExchange | None:
    if piece_bytes == 0:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    found, reason = open_exchange(rank, size, dist.PrefixStore("exchange", store), device, piece_bytes)
    if rank == 0:
        how = "copied by the ranks' copy engines" if found is not None else f"summed by NCCL: {reason}"
        logger.info("long messages that are begun early are %s", how)
    return found
