"""Sizes in bytes as people write and read them on the command line."""

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(name: str, text: str) -> int:
    """Bytes written as "80GiB", "500 MB" or "4096"; `name` is the option for the error.

    Raises:
        ValueError: it is no size, or less than one byte.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{name} must be a size such as 80GiB or 500MB, got {text!r}")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 1:
        raise ValueError(f"{name} must be at least one byte, got {text!r}")
    return size


def format_size(size: int) -> str:
    """`size` bytes in the largest binary unit that leaves at least one, with three digits or more."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    if unit == "B":
        return f"{size} B"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"
