"""Where the ranks of a replica meet before they have a group: a store in rank 0's process.

The operating system chooses the port, and rank 0 tells it to whom it starts. Nothing of it is on disk.
"""

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

Store = dist.Store
LOOPBACK = "127.0.0.1"
_FOREVER = timedelta(days=365)
"""A store's own timeout: who waits also asks whether the others are alive, so it decides."""
_POLL_S = 0.005


def host_store(address: str = LOOPBACK) -> dist.TCPStore:
    """A store that listens on `address`; its `.port` is for the others."""
    listener = socket.socket()
    listener.bind((address, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_FOREVER,
        master_listen_fd=listener.detach(),
    )


def join_store(address: str, port: int) -> dist.TCPStore:
    """The store that another process hosts."""
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_FOREVER)


def wait_for_keys(
    store: dist.Store, keys: Sequence[str], check: Callable[[], None], timeout_s: float | None = None
) -> list[bytes]:
    """The values of `keys`, once all are set; `check` is called meanwhile and may raise.

    Raises:
        TimeoutError: `timeout_s` seconds have passed; names the keys that are missing.
    """
    poll_until(lambda: all(store.check([key]) for key in keys), check, timeout_s, f"one of {', '.join(keys)}")
    return [store.get(key) for key in keys]


def poll_until(
    done: Callable[[], bool], check: Callable[[], None], timeout_s: float | None = None, what: str = ""
) -> None:
    """Return once `done()`; `check` is called meanwhile and may raise.

    Raises:
        TimeoutError: `timeout_s` seconds have passed; names `what`.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not done():
        check()
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s} s in vain for {what}")
        time.sleep(_POLL_S)
