"""Sleeping on a word of shared memory until another process changes it and says so.

Owns the system call. Where it is not known the sleep is a short one, and nobody needs to be woken.
"""

import ctypes
import platform
import sys
import time

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1
_NAP_S = 100e-6


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """One 32-bit word, at `offset` of a writable buffer that several processes map."""

    def __init__(self, buffer: memoryview, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(buffer, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        number = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        self._number = None if number is None else ctypes.c_long(number)
        self._call = ctypes.CDLL(None).syscall if number is not None else None

    def wait(self, value: int, timeout_s: float) -> None:
        """Sleep while the word is `value`, at most `timeout_s` seconds; may return early."""
        if self._call is None:
            time.sleep(min(_NAP_S, timeout_s))
            return
        limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        self._call(
            self._number,
            self._address,
            ctypes.c_int(_WAIT),
            ctypes.c_uint32(value),
            ctypes.byref(limit),
            None,
            ctypes.c_int(0),
        )

    def wake(self) -> None:
        """Wake everyone who sleeps on the word."""
        if self._call is not None:
            self._call(
                self._number,
                self._address,
                ctypes.c_int(_WAKE),
                ctypes.c_int(_ALL),
                None,
                None,
                ctypes.c_int(0),
            )

    def release(self) -> None:
        """Let go of the buffer; neither `wait` nor `wake` may follow."""
        del self._word
