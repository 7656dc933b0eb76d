"""Memory that the processes of one host share and that has no name: it ends with the last of them.

Rank 0 makes it (a memfd) and says by which process and descriptor it is found; a random token tells it from
anything else that is found there.
"""

import mmap
import os
import secrets
import stat

HEADER_BYTES = 64
_TOKEN_BYTES = 16


def host_identity() -> str:
    """Equal in two processes that can open each other's files under /proc: one boot, one pid namespace.

    Unlike a host's name it tells two containers apart. Empty where there is no such thing.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class SharedMemory:
    """`view` is the memory behind the header, writable, in every process that has it."""

    def __init__(self, descriptor: int, address: str) -> None:
        self._descriptor = descriptor
        """Stays open: others find the memory by it."""
        self._map = mmap.mmap(descriptor, 0)
        self._whole = memoryview(self._map)
        self.view = self._whole[HEADER_BYTES:]
        self.address = address
        """What `attach` takes."""

    @classmethod
    def create(cls, nbytes: int) -> "SharedMemory":
        """Zeroed memory of `nbytes` bytes."""
        descriptor = os.memfd_create("hybridserve-step-channel", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, HEADER_BYTES + nbytes)
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.pwrite(descriptor, token, 0)
        return cls(descriptor, f"{os.getpid()} {descriptor} {token.hex()}")

    @classmethod
    def attach(cls, address: str) -> "SharedMemory":
        """The memory that another process of this host created.

        Raises:
            OSError: it cannot be opened, or something else is found there.
        """
        pid, number, token = address.split()
        path = f"/proc/{int(pid)}/fd/{int(number)}"
        # opening a pipe or a device of a stranger could block or do something
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"{path} is no memory")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(descriptor, _TOKEN_BYTES, 0) != bytes.fromhex(token):
            os.close(descriptor)
            raise OSError(f"{path} is another memory")
        return cls(descriptor, address)

    def close(self) -> None:
        """Unmap it here. Views of it must have been released."""
        self.view.release()
        self._whole.release()
        self._map.close()
        os.close(self._descriptor)
