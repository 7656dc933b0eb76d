"""What an engine's start took, in seconds, and what it left of the memory, in bytes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class StartupReport:
    """Filled part by part while an engine is built."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By part, in order. "kernels" is the wait for compilation after all that could run beside it."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes by what they are for: weights, workspace, graphs, arena."""
    compiled_kernels: int = 0
    graphs: int = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done inside under `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def describe(self) -> str:
        """One line for the log."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        sizes = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in self.memory.items())
        return (
            f"ready in {sum(self.seconds.values()):.1f} s ({parts}); GiB: {sizes}; "
            f"{self.compiled_kernels} kernels, {self.graphs} graphs"
        )
