"""Traces are read and scaled as asked, and bad ones are named."""

import random
import statistics
from pathlib import Path

import pytest

from hybridserve.cluster.simulation.workload import (
    Arrival,
    Shape,
    at_trace_times,
    parse_priorities,
    poisson,
    read_trace,
    with_priorities,
)

HEADER = "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def sample(repo_root: Path) -> list[Arrival]:
    return read_trace(repo_root / "tests" / "benchmarks" / "traces" / "azure_llm_2023_code_sample.csv")


def test_the_sample(sample: list[Arrival]) -> None:
    assert len(sample) == 1000
    assert sample[0] == Arrival(0.0, 4808, 10)
    assert sample[1].at_s == pytest.approx(0.052, abs=1e-5) and sample[3].prompt_tokens == 7433
    assert all(one.at_s <= other.at_s for one, other in zip(sample, sample[1:], strict=False))


def test_times_over_midnight(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2023-11-17 00:00:00.5000000,7,8\n2023-11-16 23:59:59,5,6\n")
    assert read_trace(path) == [Arrival(0.0, 5, 6), Arrival(1.5, 7, 8)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens\n", "has no column GeneratedTokens"),
        (HEADER, "has no rows"),
        (HEADER + "2023-11-16 18:17:03,1,2\nyesterday,1,2\n", "line 3"),
        (HEADER + "2023-11-16 18:17:03,1,\n", "line 2"),
        (HEADER + "2023-11-16 18:17:03,0,2\n", "line 2: token counts must be positive, got 0 and 2"),
    ],
)
def test_bad_traces(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_lengths() -> None:
    shape = Shape(scale=0.25, answer_scale=2.0, max_tokens=100, context=512)
    assert shape.apply(Arrival(1.0, 1000, 20)) == Arrival(1.0, 250, 40)
    assert shape.apply(Arrival(1.0, 1, 80)) == Arrival(1.0, 1, 100)
    # the prompt gives way to the answer
    assert shape.apply(Arrival(1.0, 4000, 30)) == Arrival(1.0, 452, 60)
    for wrong in ({"scale": 0}, {"answer_scale": float("inf")}, {"max_tokens": 0}, {"context": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            Shape(**wrong)


def test_a_trace_is_repeated_with_its_gaps(sample: list[Arrival]) -> None:
    load = at_trace_times(sample, 2500, 0.5)
    assert len(load) == 2500 and load[2].at_s == pytest.approx(sample[2].at_s / 2)
    gaps = [later.at_s - one.at_s for one, later in zip(load, load[1:], strict=False)]
    assert min(gaps) >= 0 and gaps[999] == pytest.approx(statistics.fmean(gaps[:999]))
    assert [one.prompt_tokens for one in load[1000:2000]] == [one.prompt_tokens for one in sample]


def test_poisson(sample: list[Arrival]) -> None:
    load = poisson(sample, 20_000, 8.0, random.Random(1))
    gaps = [later.at_s - one.at_s for one, later in zip(load, load[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05)
    mean = statistics.fmean(one.prompt_tokens for one in sample)
    assert statistics.fmean(one.prompt_tokens for one in load) == pytest.approx(mean, rel=0.03)
    assert load == poisson(sample, 20_000, 8.0, random.Random(1))
    with pytest.raises(ValueError, match="rate must be a positive number, got 0"):
        poisson(sample, 1, 0, random.Random(1))


def test_priorities(sample: list[Arrival]) -> None:
    mix = parse_priorities("high=1, low=3")
    assert mix == {"high": 1.0, "low": 3.0}
    load = with_priorities(sample, mix, random.Random(1))
    assert sum(one.priority == "low" for one in load) == pytest.approx(750, abs=50)
    assert parse_priorities("normal") == {"normal": 1.0}
    for text, message in (("urgent=1", "got 'urgent'"), ("high=much", "got 'much'"), ("low=-1", "got -1")):
        with pytest.raises(ValueError, match=message):
            parse_priorities(text)
