"""Which heads of a layer a shard holds.

Both mixers have heads that own an output ("query" or "value" heads) and fewer heads that these share ("KV" or
"key" heads). Shards cut the first evenly and hold a copy of every shared head they need, so a shared head may
live on several shards. Knows nothing of tensors.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class HeadShard:
    """One shard's heads. Its head `i` uses its shared head `i // (num_heads // num_shared_heads)`."""

    first_head: int
    num_heads: int
    shared_heads: tuple[int, ...]
    """The model's index of each shared head of the shard; one may occur twice where groups do not align."""

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(range(self.first_head, self.first_head + self.num_heads))

    @property
    def num_shared_heads(self) -> int:
        return len(self.shared_heads)


def working_sizes(total: int) -> tuple[int, ...]:
    """The tp_sizes that divide `total`, ascending."""
    return tuple(size for size in range(1, total + 1) if total % size == 0)


def divide(what: str, total: int, size: int) -> int:
    """`total // size`.

    Raises:
        ValueError: `size` does not divide `total`; names both and the nearest sizes that do.
    """
    if total % size:
        sizes = working_sizes(total)
        below = max(s for s in sizes if s < size)
        nearest = [below] + [s for s in sizes if s > size][:1]
        raise ValueError(
            f"tp_size {size} does not divide {what} {total}; the nearest that does is "
            f"{' or '.join(map(str, nearest))}"
        )
    return total // size


def shard_heads(what: str, total_heads: int, total_shared_heads: int, rank: int, size: int) -> HeadShard:
    """The heads of shard `rank` of `size`; `what` names `total_heads` in errors.

    Head h of the model uses shared head `h // ratio`. The shard's heads fall into runs of
    gcd(heads a shard, ratio), each within one group, so that local heads divide evenly over local shared
    heads whatever the numbers are.

    Raises:
        ValueError: `size` does not divide `total_heads`.
    """
    assert total_heads % total_shared_heads == 0, (total_heads, total_shared_heads)
    ratio = total_heads // total_shared_heads
    count = divide(what, total_heads, size)
    first = rank * count
    run = math.gcd(count, ratio)
    return HeadShard(first, count, tuple(head // ratio for head in range(first, first + count, run)))
