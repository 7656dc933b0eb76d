"""The workloads: a row of the table each, named as in `goals.py`.

TTFT is one `generate` of one prompt and one token. TPOT is (t(steps + 1 tokens) - t(1 token)) / steps over a
whole batch. Prompts are random ids, decoding is greedy, ends of sequence are ignored.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from goals import Goal
from session import Session, greedy

from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.llm import SamplingParams

NO_END = 10**6
"""More tokens than a context holds: whoever asked for them aborts the request."""


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are; the defaults are what the goals are for."""

    warm_up: int = 1024
    first: tuple[int, ...] = (1024, 8192, 32768)
    """Prompts that a start is not over before."""
    ttft: tuple[int, ...] = (100, 512, 1024, 8192, 32768, 131072)
    ttft_runs: int = 3
    tpot_batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    tpot_prompt: int = 512
    tpot_steps: int = 128
    long_context: int = 32768
    long_steps: int = 64
    contexts: tuple[tuple[int, int], ...] = ()
    """(batch, prompt) pairs of further rows: the time of a step once all are decoding."""
    mixed_requests: int = 256
    mixed_short: tuple[int, int] = (64, 1024)
    mixed_long: tuple[int, int] = (4096, 16384)
    mixed_outputs: tuple[int, int] = (64, 256)
    capacity: int = 8192
    temperature_batches: tuple[int, ...] = (32, 256)
    chunks: tuple[int, ...] = (64, 256)
    """Tokens of a prompt that comes with each step of the streams."""
    streams: int = 32
    stream_steps: int = 200
    arriving_prompt: int = 16384
    arrivals: int = 10
    arrival_interval_s: float = 1.0
    profile_prompt: int = 8192
    profile_batches: tuple[int, ...] = (32, 128, 256)
    profile_steps: int = 8
    """Of mixed load."""


QUICK = Sizes(
    warm_up=32,
    first=(32, 128),
    ttft=(32, 128),
    ttft_runs=2,
    tpot_batches=(1, 4),
    tpot_prompt=16,
    tpot_steps=4,
    long_context=256,
    long_steps=4,
    mixed_requests=6,
    mixed_short=(4, 32),
    mixed_long=(64, 128),
    mixed_outputs=(2, 6),
    capacity=256,
    temperature_batches=(4,),
    chunks=(5,),
    streams=3,
    stream_steps=6,
    arriving_prompt=200,
    arrivals=2,
    arrival_interval_s=0.1,
    profile_prompt=128,
    profile_batches=(3,),
    profile_steps=2,
)
"""To see that everything runs, on a CPU in seconds; no goal is for these."""


@dataclass(frozen=True)
class Measured:
    """One row's figures."""

    value: float
    unit: str
    runs: tuple[float, ...] = ()
    """What `value` is the median of."""
    goal: Goal | None = None
    """A bound that follows from the measurement itself; else the table's."""
    more_is_better: bool = False
    notes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    name: str
    measure: Callable[[Session], Measured]


def rows(sizes: Sizes, rounds: int, fill: bool) -> Iterator[Row]:
    """All rows that need a running engine, cheapest first within each kind."""
    for length in sizes.ttft:
        yield Row(f"TTFT {length}", lambda s, n=length: ttft(s, n, sizes.ttft_runs if n < 100_000 else 1))
    for batch in sizes.tpot_batches:
        yield Row(f"TPOT {batch}", _tpot(batch, sizes.tpot_prompt, sizes.tpot_steps, rounds))
    for batch, prompt in sizes.contexts:
        name = f"TPOT {batch} at {prompt}"
        yield Row(name, lambda s, b=batch, p=prompt: steady(s, b, p, sizes.tpot_steps // 2))
    yield Row(
        f"TPOT 1 at {sizes.long_context}", _tpot(1, sizes.long_context, sizes.long_steps, min(rounds, 3))
    )
    yield Row(f"mixed {sizes.mixed_requests}", lambda s: mixed(s, sizes))
    yield Row(f"capacity {sizes.capacity}", lambda s: capacity(s, sizes.capacity, fill))
    for batch in sizes.temperature_batches:
        yield Row(f"temperature {batch}", lambda s, n=batch: temperature(s, n, sizes, min(rounds, 3)))
    for length in sizes.chunks:
        yield Row(f"step of {sizes.streams} and {length}", lambda s, n=length: step_with_chunk(s, n, sizes))
    yield Row("inter-token p99", lambda s: inter_token(s, sizes))


def _tpot(batch: int, prompt: int, steps: int, rounds: int) -> Callable[[Session], Measured]:
    return lambda s: tpot(s, batch, prompt, steps, rounds)


def ttft(s: Session, length: int, runs: int) -> Measured:
    s.generate([s.prompt(length)], greedy(1))
    times = [s.generate([s.prompt(length)], greedy(1)) * 1e3 for _ in range(runs)]
    return Measured(statistics.median(times), "ms", tuple(times))


def tpot(s: Session, batch: int, length: int, steps: int, rounds: int) -> Measured:
    preemptions = s.engine.load().preemptions
    s.generate(s.prompts(batch, length), greedy(4))
    times = [one_tpot(s, batch, length, steps, greedy) for _ in range(rounds)]
    requests = [s.add(prompt, greedy(NO_END)) for prompt in s.prompts(batch, length)]
    s.run_until_started(requests)
    device = s.step_times(steps // 2)
    s.abort(requests)
    notes = {
        "median step of the device, ms": statistics.median(device),
        "preemptions": s.engine.load().preemptions - preemptions,
    }
    return Measured(statistics.median(times), "ms", tuple(times), notes=notes)


def steady(s: Session, batch: int, length: int, steps: int) -> Measured:
    """The mean of `steps` steps after every prompt is computed, which is once: for prompts that take long."""
    before = s.engine.load().preemptions
    requests = [s.add(prompt, greedy(NO_END)) for prompt in s.prompts(batch, length)]
    s.run_until_started(requests)
    s.wait()
    began = time.perf_counter()
    for _ in range(steps):
        s.step()
    s.wait()
    value = (time.perf_counter() - began) / steps * 1e3
    device = statistics.median(s.step_times(steps))
    s.abort(requests)
    preemptions = s.engine.load().preemptions - before
    return Measured(value, "ms", notes={"median step of the device, ms": device, "preemptions": preemptions})


def one_tpot(
    s: Session, batch: int, length: int, steps: int, params: Callable[[int], SamplingParams]
) -> float:
    """Milliseconds a step, over the batch."""
    first = s.generate(s.prompts(batch, length), params(1))
    return (s.generate(s.prompts(batch, length), params(steps + 1)) - first) / steps * 1e3


def mixed_lengths(s: Session, sizes: Sizes) -> tuple[list[int], list[int]]:
    """Lengths of the mixed requests' prompts and answers; seeds the session for the prompts themselves."""
    rng = s.rng = random.Random(1)
    lens = [
        rng.randint(*sizes.mixed_short) if rng.random() < 0.8 else rng.randint(*sizes.mixed_long)
        for _ in range(sizes.mixed_requests)
    ]
    return lens, [rng.randint(*sizes.mixed_outputs) for _ in lens]


def mixed(s: Session, sizes: Sizes) -> Measured:
    lens, outs = mixed_lengths(s, sizes)
    before = s.engine.load().preemptions
    seconds = s.generate([s.prompt(length) for length in lens], [greedy(n) for n in outs])
    notes = {
        "prompt tokens": sum(lens),
        "output tokens": sum(outs),
        "tokens/s": (sum(lens) + sum(outs)) / seconds,
        "output tokens/s": sum(outs) / seconds,
        "preemptions": s.engine.load().preemptions - before,
    }
    return Measured(seconds, "s", notes=notes)


def capacity(s: Session, length: int, fill: bool) -> Measured:
    """Sequences of `length` tokens alive at once: an arena of the engine's size, allocated until it refuses.

    With `fill` the engine's own is filled too, with real requests, as far as max_num_seqs lets it; the value
    is then the most sequences that had their prompt computed at once.
    """
    live = s.engine.arena
    arena = Arena(live.layout, live.num_extents)
    pages, count = live.layout.pages_for(length), 0
    while arena.fits(1, pages):
        if not (arena.allocate_unit([]) and arena.allocate_pages(pages, [])):
            raise RuntimeError(f"the arena refused sequence {count}, which it said would fit")
        count += 1
    arena.check_integrity()
    notes = {"pages used": arena.pages_used, "units used": arena.units_used}
    if fill:
        notes["allocated"] = count
        count = filled(s, length, count)
        notes["max_num_seqs"] = s.engine.max_num_seqs
    return Measured(count, "sequences", more_is_better=True, notes=notes)


def filled(s: Session, length: int, expected: int) -> int:
    """How many real sequences of `length` tokens the engine has alive before one must wait or give way."""
    requests = [s.add(s.prompt(length), greedy(NO_END)) for _ in range(min(expected, s.engine.max_num_seqs))]
    alive: set[str] = set()
    before = s.engine.load().preemptions
    while len(alive) < len(requests) and s.engine.load().preemptions == before:
        alive |= {one.request_id for one in s.step() if one.token_ids}
    s.abort(requests)
    s.engine.arena.check_integrity()
    return len(alive)


def temperature(s: Session, batch: int, sizes: Sizes, rounds: int) -> Measured:
    """TPOT of drawn tokens over that of greedy ones, in turns."""

    def drawn(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=max_tokens, ignore_eos=True)

    times: dict[str, list[float]] = {"greedy": [], "drawn": []}
    for params in (greedy, drawn):
        s.generate(s.prompts(batch, sizes.tpot_prompt), params(4))
    for _ in range(rounds):
        for name, params in (("greedy", greedy), ("drawn", drawn)):
            times[name].append(one_tpot(s, batch, sizes.tpot_prompt, sizes.tpot_steps, params))
    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = tuple(d / g for d, g in zip(times["drawn"], times["greedy"], strict=True))
    notes = {f"{name}, ms": value for name, value in median.items()}
    return Measured(median["drawn"] / median["greedy"], "x greedy", ratios, notes=notes)


def step_with_chunk(s: Session, length: int, sizes: Sizes) -> Measured:
    """A step of decode rows and a prompt of `length` tokens, which comes and goes with it."""
    streams = [s.add(s.prompt(sizes.tpot_prompt), greedy(NO_END)) for _ in range(sizes.streams)]
    s.run_until_started(streams)
    times: dict[bool, list[float]] = {False: [], True: []}
    for step in range(2 * sizes.stream_steps):
        # the first half without, and as much to warm up
        chunk = step >= sizes.stream_steps
        if chunk:
            s.add(s.prompt(length), greedy(1))
        began = time.perf_counter()
        s.step()
        times[chunk].append((time.perf_counter() - began) * 1e3)
    s.clear()
    alone, together = (values[len(values) // 4 :] for values in times.values())
    notes = {"the rows alone, ms": statistics.median(alone)}
    return Measured(statistics.median(together), "ms", notes=notes)


def inter_token(s: Session, sizes: Sizes) -> Measured:
    """p99 of the gaps between a stream's tokens while long prompts arrive, one an interval.

    Its bound is twice the streams' p50 alone and the time of one full prefill step.
    """
    chunk = min(s.batched_tokens, sizes.arriving_prompt)
    chunk_ms = ttft(s, chunk, 3).value
    streams = [s.add(s.prompt(sizes.tpot_prompt), greedy(NO_END)) for _ in range(sizes.streams)]
    s.run_until_started(streams)
    last = dict.fromkeys(streams, time.perf_counter())
    alone = sorted(gap for _ in range(sizes.stream_steps) for gap in _gaps(s, last))
    waiting: set[str] = set()
    gaps: list[float] = []
    due = time.perf_counter()
    arrived = 0
    while arrived < sizes.arrivals or waiting:
        if arrived < sizes.arrivals and time.perf_counter() >= due:
            waiting.add(s.add(s.prompt(sizes.arriving_prompt), greedy(1)))
            arrived += 1
            due += sizes.arrival_interval_s
        gaps += _gaps(s, last, waiting)
    s.abort(streams)
    gaps.sort()
    p50 = statistics.median(alone)
    notes = {
        "p50 alone, ms": p50,
        "p50, ms": statistics.median(gaps),
        "worst, ms": gaps[-1],
        "one chunk, ms": chunk_ms,
        "tokens": len(gaps),
    }
    return Measured(_percentile(gaps, 0.99), "ms", goal=Goal(2 * p50 + chunk_ms), notes=notes)


def _gaps(s: Session, last: dict[str, float], waiting: set[str] | None = None) -> list[float]:
    """One step's gaps in milliseconds of the streams in `last`; what has ended leaves `waiting`."""
    news = s.step()
    now = time.perf_counter()
    found = []
    for one in news:
        if one.request_id in last and one.token_ids:
            found.append((now - last[one.request_id]) * 1e3)
            last[one.request_id] = now
        if waiting is not None and one.finished:
            waiting.discard(one.request_id)
    return found


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def start(s: Session, imports: float, ready: float) -> Measured:
    """Seconds from the script's first line to an engine that takes requests, and the parts of them."""
    startup = s.engine.startup_report
    seconds = {"imports": imports, **startup.seconds}
    notes = {f"{name}, s": value for name, value in seconds.items()}
    notes["other, s"] = ready - sum(seconds.values())
    notes |= {f"{name}, GiB": size / 2**30 for name, size in startup.memory.items()}
    notes |= {"kernels compiled": startup.compiled_kernels, "graphs": startup.graphs}
    return Measured(ready, "s", notes=notes)


def first_lengths(s: Session, sizes: Sizes, ready: float) -> Measured:
    """The same and the first prompts of three lengths, before any other request."""
    lengths = [length for length in sizes.first if length < s.engine.max_model_len]
    firsts = {f"first {n}, s": s.generate([s.prompt(n)], greedy(1)) for n in lengths}
    return Measured(ready + sum(firsts.values()), "s", notes=firsts)


def peak_memory(s: Session) -> Measured:
    """What is taken of the card at the end, in GiB: torch gives nothing back, so it is the most. Of several
    ranks' cards, rank 0's."""
    free, total = torch.cuda.mem_get_info(s.device)
    notes = {
        "allocated, GiB": torch.cuda.max_memory_allocated(s.device) / 2**30,
        "reserved, GiB": torch.cuda.max_memory_reserved(s.device) / 2**30,
        "card, GiB": total / 2**30,
    }
    return Measured((total - free) / 2**30, "GiB", notes=notes)
