"""Which heads of a layer a shard holds.

Both mixers have heads that own an output ("query" or "value" heads) and fewer heads that these share ("KV" or
"key" heads). Shards cut the first evenly and hold a copy of every shared head they need, so a shared head may
live on several shards. Where there are more shards than heads, the channels of a head's output are cut too.
Knows nothing of tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

SPLITS = ("heads", "head_v_dim")
"""What `shard_value_heads` cuts first."""


@dataclass(frozen=True)
class HeadShard:
    """One shard's heads. Its head `i` uses its shared head `i // (num_heads // num_shared_heads)`."""

    first_head: int
    num_heads: int
    shared_heads: tuple[int, ...]
    """The model's index of each shared head of the shard; one may occur twice where groups do not align."""
    part: int = 0
    num_parts: int = 1
    """The shard holds part `part` of `num_parts` equal ones of each head's output channels."""

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(range(self.first_head, self.first_head + self.num_heads))

    @property
    def num_shared_heads(self) -> int:
        return len(self.shared_heads)

    def channels(self, head_dim: int) -> tuple[int, int]:
        """[start, end) of the output channels that the shard holds of each of its heads."""
        width = head_dim // self.num_parts
        return self.part * width, (self.part + 1) * width


def divide(what: str, total: int, size: int) -> int:
    """`total // size`.

    Raises:
        ValueError: `size` does not divide `total`; names both and the nearest sizes that do.
    """
    check_divides([(what, total)], size)
    return total // size


def check_divides(totals: Sequence[tuple[str, int]], size: int) -> None:
    """Raise ValueError unless `size` divides all `totals`, pairs of what each is and how many.

    The message names those it does not divide, and the nearest sizes that divide all.
    """
    wrong = [f"{what} {total}" for what, total in dict.fromkeys(totals) if total % size]
    if not wrong:
        return
    common = math.gcd(*(total for _, total in totals))
    nearest = [
        *_first_divisor(common, range(size - 1, 0, -1)),
        *_first_divisor(common, range(size + 1, common + 1)),
    ]
    raise ValueError(
        f"tp_size {size} does not divide {' and '.join(wrong)}; the nearest that does is "
        f"{' or '.join(map(str, nearest))}"
    )


def _first_divisor(total: int, sizes: range) -> Iterator[int]:
    yield from islice((size for size in sizes if total % size == 0), 1)


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


def shard_value_heads(
    what: str, total_heads: int, total_shared_heads: int, head_dim: int, rank: int, size: int, split: str
) -> HeadShard:
    """The heads of a layer whose heads' output channels do not depend on one another, as linear attention's.

    `split` "heads" cuts by heads as far as these go (into gcd(size, total_heads) parts) and what is left of
    `size` along the `head_dim` output channels of every head; "head_v_dim" the other way round. Ranks that
    share their heads are neighbours. Both take every size that divides total_heads * head_dim.

    Raises:
        ValueError: `size` does not divide total_heads * head_dim, which is named `what`.
    """
    divide(what, total_heads * head_dim, size)
    parts = {"heads": size // math.gcd(size, total_heads), "head_v_dim": math.gcd(size, head_dim)}
    num_parts = parts[split]
    group, part = divmod(rank, num_parts)
    shard = shard_heads(what, total_heads, total_shared_heads, group, size // num_parts)
    return replace(shard, part=part, num_parts=num_parts)
