"""Whose time a replay's is."""

import time

import torch

from hybridserve.parallel.comm_benchmark.timing import Meeting, measure

CPU = torch.device("cpu")
OTHER_RANK_S = 0.5


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
