"""An append-only file of lines that several processes of a node write, renamed when it has grown too large.

The standard library's rotating handlers are for one process: two would rename each other's files away. Here
every write is one `write` to a file opened with O_APPEND, which Linux does as a whole on a local file system
(not on NFS), and who finds the file too large renames it under a lock; the others notice that the path is
another file by now.
"""

import fcntl
import os
from pathlib import Path


class SharedFile:
    """The file at `path`, opened when something is written.

    Args:
        rotate_bytes: a file that has reached this is renamed to `path.1`, and that to `path.2`, before more
            is written.
        max_files: with `path` itself; 1 throws away what was written.
    """

    def __init__(self, path: Path, rotate_bytes: int, max_files: int) -> None:
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._max_files = max_files
        self._fd: int | None = None

    def write(self, lines: bytes) -> None:
        """Append whole lines. Raises OSError when the disk does not take them."""
        fd = self._open()
        rest = memoryview(lines)
        # a full disk takes a part; the rest may follow, or raise
        while rest:
            rest = rest[os.write(fd, rest) :]

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is not None and not self._is_current(self._fd):
            self.close()
        if self._fd is None:
            self._fd = self._open_path()
        if os.fstat(self._fd).st_size >= self._rotate_bytes:
            self._rotate()
            self.close()
            self._fd = self._open_path()
        return self._fd

    def _open_path(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _is_current(self, fd: int) -> bool:
        try:
            at_path = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(at_path, os.fstat(fd))

    def _rotate(self) -> None:
        lock = os.open(self._numbered("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                size = os.stat(self._path).st_size
            except FileNotFoundError:
                return
            if size < self._rotate_bytes:
                # another process was first
                return
            if self._max_files == 1:
                os.unlink(self._path)
                return
            for number in range(self._max_files - 1, 1, -1):
                if os.path.exists(self._numbered(number - 1)):
                    os.replace(self._numbered(number - 1), self._numbered(number))
            os.replace(self._path, self._numbered(1))
        finally:
            os.close(lock)

    def _numbered(self, suffix: int | str) -> str:
        return f"{self._path}.{suffix}"
