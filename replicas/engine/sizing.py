"""How much memory the arena gets, and how many sequences of what length it then holds."""

from dataclasses import dataclass

from hybridserve.replicas.arena.layout import ArenaLayout

CONTEXTS_TO_REPORT = (1024, 8192, 32768)


@dataclass(frozen=True)
class Capacity:
    """An arena's size, and the limits clamped to it."""

    num_extents: int
    max_model_len: int
    max_num_seqs: int


def plan_capacity(
    layout: ArenaLayout,
    cache_bytes: int,
    *,
    model_max_len: int,
    max_model_len: int | None,
    max_num_seqs: int,
) -> Capacity:
    """Clamp the limits to what `cache_bytes` bytes hold.

    Raises:
        ValueError: a context was asked for that the model or the arena does not reach or that holds no prompt
            and answer, or the arena does not hold one sequence of one page; the message has both numbers.
    """
    num_extents = cache_bytes // layout.extent_bytes
    longest = longest_sequence(layout, num_extents)
    if longest < 2:
        least = layout.extents_for(1, 1) * layout.extent_bytes
        raise ValueError(
            f"cache_memory_bytes is {cache_bytes}, but one sequence of one page takes {least} bytes "
            f"({layout.extent_bytes} an extent)"
        )
    if max_model_len is not None and max_model_len < 2:
        raise ValueError(f"max_model_len is {max_model_len}, but a prompt and its answer take 2 at least")
    if max_model_len is not None and max_model_len > model_max_len:
        raise ValueError(f"max_model_len is {max_model_len}, but the model's own limit is {model_max_len}")
    if max_model_len is not None and max_model_len > longest:
        needed = layout.extents_for(1, layout.pages_for(max_model_len)) * layout.extent_bytes
        raise ValueError(
            f"max_model_len is {max_model_len}, but the arena of {cache_bytes} bytes holds one sequence of "
            f"{longest} tokens; {needed} bytes are needed"
        )
    length = min(model_max_len, longest) if max_model_len is None else max_model_len
    return Capacity(num_extents, length, min(max_num_seqs, sequences_that_fit(layout, num_extents, 1)))


def longest_sequence(layout: ArenaLayout, num_extents: int) -> int:
    """Tokens of one sequence that has the arena to itself (without full attention: no bound, 2**31)."""
    pages = (num_extents - layout.extents_for(1, 0)) * layout.pages_per_extent
    if num_extents < layout.extents_for(1, 1):
        return 0
    return pages * layout.page.page_size if layout.page.nbytes else 2**31


def sequences_that_fit(layout: ArenaLayout, num_extents: int, num_tokens: int) -> int:
    """How many sequences of `num_tokens` tokens the arena holds at once (found by bisection)."""
    pages = layout.pages_for(num_tokens)
    low, high = 0, 1
    while layout.extents_for(high, high * pages) <= num_extents:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if layout.extents_for(middle, middle * pages) <= num_extents:
            low = middle
        else:
            high = middle
    return low


def describe_capacity(layout: ArenaLayout, capacity: Capacity) -> str:
    """One line for the log: the arena's size and how many sequences of what length fit at once."""
    lengths = [n for n in CONTEXTS_TO_REPORT if n < capacity.max_model_len] + [capacity.max_model_len]
    fits = ", ".join(f"{sequences_that_fit(layout, capacity.num_extents, n)} of {n}" for n in lengths)
    mib = capacity.num_extents * layout.extent_bytes / 2**20
    return (
        f"arena {mib:.0f} MiB, {capacity.num_extents} extents of {layout.extent_bytes / 2**20:.2f} MiB "
        f"({layout.units_per_extent} units or {layout.pages_per_extent} pages of {layout.page.page_size} "
        f"tokens); sequences that fit at once, by tokens: {fits}"
    )
