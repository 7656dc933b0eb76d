"""How many replays a row gets, by steps that do nothing but take time."""

import time

import pytest
import torch

from hybridserve.parallel.comm_benchmark.timing import Meeting, measure
from hybridserve.parallel.group import SINGLE


class SlowMeeting(Meeting):
    """Ranks that take long to meet: what a replay costs beside its step."""

    def meet(self) -> None:
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [Meeting, SlowMeeting])
def test_a_row_ends_in_time(kind: type[Meeting]) -> None:
    """Whether its step takes the time or what is around it; at least the fewest replays are made."""
    step = (lambda: None) if kind is SlowMeeting else (lambda: time.sleep(0.01))
    meeting = kind(SINGLE, torch.device("cpu"))
    limits = {"min_replays": 2, "max_replays": 1000}
    (times,) = measure([step], meeting, row_seconds=0.1, **limits)
    assert 2 <= times.replays <= 10
    (fewest,) = measure([step], meeting, row_seconds=0.001, **limits)
    assert fewest.replays == 2


def test_a_quick_step_gets_all_replays() -> None:
    meeting = Meeting(SINGLE, torch.device("cpu"))
    first, second = measure([lambda: None] * 2, meeting, row_seconds=60.0, min_replays=3, max_replays=50)
    assert first.replays == second.replays == 50
