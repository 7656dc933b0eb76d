"""The shard actors as rank 0, the engine's process, uses them: the cluster's form of `RankProcesses`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

if TYPE_CHECKING:
    from hybridserve.replicas.engine.ranks import RankStart


class ShardProcesses:
    """Ranks 1 … are `actors` in order, which somebody else has started; each sees its own GPU alone."""

    def __init__(self, actors: Sequence[ActorHandle]) -> None:
        self._actors = tuple(actors)
        self._runs: dict[int, ray.ObjectRef] = {}

    @property
    def address(self) -> str:
        return ray.util.get_node_ip_address()

    def device_index(self, rank: int) -> int:
        return 0

    def start(self, start: "RankStart") -> None:
        # pending as long as the rank runs: this is how its end is heard of
        self._runs[start.rank] = self._actors[start.rank - 1].run.remote(start)

    def end_of(self, rank: int) -> str | None:
        ended, _ = ray.wait([self._runs[rank]], timeout=0)
        if not ended:
            return None
        try:
            reason = ray.get(ended[0])
        except RayActorError as error:
            return f"died: {first_line(error)}"
        return "has left" if reason is None else f"failed: {reason}"

    def wait(self, timeout_s: float) -> None:
        runs = list(self._runs.values())
        ray.wait(runs, num_returns=len(runs), timeout=timeout_s)

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


def first_line(error: BaseException) -> str:
    """Ray's errors go on with a page of details."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
