"""Which requests come when: read from a trace or drawn, scaled, and cut to a context.

Shared by the simulator and the load generator of tests/benchmarks, so that both offer the same load.
"""

import csv
import datetime
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybridserve.cluster.routing.admission import PRIORITIES, Priority

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, before anything is known of how it goes."""

    at_s: float
    """Since the load began."""
    prompt_tokens: int
    answer_tokens: int
    priority: Priority = "normal"
    says_max_tokens: bool = True
    """Whether the client says how long the answer may be."""

    @property
    def length(self) -> int:
        """What buckets go by."""
        return self.prompt_tokens + (self.answer_tokens if self.says_max_tokens else 0)


def read_trace(path: Path) -> list[Arrival]:
    """A CSV file with the columns of the Azure LLM inference traces, in the order of its times.

    Raises:
        ValueError: a column is missing or a value is wrong; the message names the line.
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}")
        rows = [_read_row(path, line, row) for line, row in enumerate(reader, 2)]
    if not rows:
        raise ValueError(f"{path} has no rows")
    rows.sort(key=lambda row: row.at_s)
    first = rows[0].at_s
    return [replace(row, at_s=row.at_s - first) for row in rows]


def _read_row(path: Path, line: int, row: dict[str, str]) -> Arrival:
    try:
        # seven digits of a second are one more than a datetime reads
        day, _, fraction = row["TIMESTAMP"].partition(".")
        at = datetime.datetime.fromisoformat(day).replace(tzinfo=datetime.UTC).timestamp()
        prompt, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        at += float(f"0.{fraction or 0}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}, line {line}: {error}") from None
    if prompt < 1 or answer < 1:
        raise ValueError(f"{path}, line {line}: token counts must be positive, got {prompt} and {answer}")
    return Arrival(at, prompt, answer)


@dataclass(frozen=True)
class Shape:
    """How a trace's lengths are changed."""

    scale: float = 1.0
    """Of prompts."""
    answer_scale: float = 1.0
    max_tokens: int | None = None
    """Of an answer, after scaling."""
    context: int | None = None
    """Of prompt and answer together."""

    def __post_init__(self) -> None:
        for name in ("scale", "answer_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        for name, least in (("max_tokens", 1), ("context", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    def apply(self, arrival: Arrival) -> Arrival:
        """The arrival with its lengths changed; a token of each is always left."""
        prompt = max(1, round(arrival.prompt_tokens * self.scale))
        answer = max(1, round(arrival.answer_tokens * self.answer_scale))
        if self.max_tokens is not None:
            answer = min(answer, self.max_tokens)
        if self.context is not None:
            answer = min(answer, self.context - 1)
            prompt = min(prompt, self.context - answer)
        return replace(arrival, prompt_tokens=prompt, answer_tokens=answer)


def at_trace_times(rows: Sequence[Arrival], num_requests: int, time_scale: float) -> list[Arrival]:
    """The trace's own gaps, each `time_scale` times as long; it begins anew when it is used up."""
    _check_positive("time_scale", time_scale)
    # a gap as long as its mean one between its last row and its first again
    period = rows[-1].at_s * (1 + 1 / max(1, len(rows) - 1))
    out = []
    for index, row in enumerate(itertools.islice(itertools.cycle(rows), num_requests)):
        out.append(replace(row, at_s=time_scale * (row.at_s + index // len(rows) * period)))
    return out


def poisson(rows: Sequence[Arrival], num_requests: int, rate: float, rng: random.Random) -> list[Arrival]:
    """Lengths drawn from the trace's rows, arrivals independent of each other at `rate` a second."""
    _check_positive("rate", rate)
    at = 0.0
    out = []
    for _ in range(num_requests):
        at += rng.expovariate(rate)
        out.append(replace(rng.choice(rows), at_s=at))
    return out


def with_priorities(
    arrivals: Iterable[Arrival], mix: dict[Priority, float], rng: random.Random
) -> list[Arrival]:
    """Priorities drawn with the mix's weights."""
    names, weights = list(mix), list(mix.values())
    return [replace(one, priority=rng.choices(names, weights)[0]) for one in arrivals]


def parse_priorities(text: str) -> dict[Priority, float]:
    """A mix like "high=0.1,normal=0.9".

    Raises:
        ValueError: a name or a weight is wrong.
    """
    mix: dict[Priority, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        if name not in PRIORITIES:
            raise ValueError(f"priority must be one of {', '.join(PRIORITIES)}, got {name!r}")
        try:
            mix[name] = float(weight or 1)
        except ValueError:
            raise ValueError(f"priority {name}: its weight must be a number, got {weight!r}") from None
        _check_positive(f"priority {name}: its weight", mix[name])
    return mix


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value}")
