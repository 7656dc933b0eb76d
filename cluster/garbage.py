"""How often a process on a token's path looks for reference cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# a frame of 256 streams, unpacked, is more than the 700 objects after which Python looks by default
_THRESHOLD = 50_000


def collect_rarely() -> None:
    """For processes that make many objects without cycles and hold few for long.

    What they have made until now is never looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD, 20, 20)


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """For imports: they make many objects, all of which stay. What has been made is never looked at again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
