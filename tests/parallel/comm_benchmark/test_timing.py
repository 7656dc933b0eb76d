"""How many replays a row gets, and whose time a replay's is."""

import time

import pytest
import torch

from hybridserve.parallel.comm_benchmark.timing import Meeting, measure
from hybridserve.parallel.group import SINGLE

CPU = torch.device("cpu")
OTHER_RANK_S = 0.5


class SlowMeeting(Meeting):
    """Ranks that take long to meet: what a replay costs beside its step."""

    def meet(self) -> None:
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [Meeting, SlowMeeting])
def test_a_row_ends_in_time(kind: type[Meeting]) -> None:
    """Whether its step takes the time or what is around it; at least the fewest replays are made."""
    step = (lambda: None) if kind is SlowMeeting else (lambda: time.sleep(0.01))
    meeting = kind(SINGLE, CPU)
    limits = {"min_replays": 2, "max_replays": 1000}
    (times,) = measure([step], meeting, row_seconds=0.1, **limits)
    assert 2 <= times.replays <= 10
    (fewest,) = measure([step], meeting, row_seconds=0.001, **limits)
    assert fewest.replays == 2


def test_a_quick_step_gets_all_replays() -> None:
    meeting = Meeting(SINGLE, CPU)
    first, second = measure([lambda: None] * 2, meeting, row_seconds=60.0, min_replays=3, max_replays=50)
    assert first.replays == second.replays == 50


class SlowAtFirst:
    """Two ranks, this one and one whose first replays of a measurement take `OTHER_RANK_S`."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        other = torch.zeros_like(x)
        other[:, 0] = OTHER_RANK_S
        return torch.cat([x, other], dim)


def test_a_replay_takes_as_long_as_its_slowest_rank() -> None:
    meeting = Meeting(SlowAtFirst(), CPU)
    assert meeting.slowest([0.1, 0.2, 0.9]) == [OTHER_RANK_S, 0.2, 0.9]
    (times,) = measure([lambda: time.sleep(0.001)], meeting, row_seconds=0.0, min_replays=4, max_replays=9)
    assert times.replays == 4
    assert times.p99_us == OTHER_RANK_S * 1e6 and 1e3 <= times.p50_us < OTHER_RANK_S * 1e6
