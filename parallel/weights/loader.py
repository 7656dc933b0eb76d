"""Fills a model's parameters from a checkpoint: every tensor once, every element once, nothing silently left.

Owns the match between checkpoint names and parameters, which follows from the parameters' own sections. Knows
nothing of mixers or of cutting, and draws no progress bar: it reports bytes to a callback.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from hybridserve.parallel.weights.checkpoint import Checkpoint
from hybridserve.parallel.weights.dummy import DummyTensor
from hybridserve.parallel.weights.parameter import ShardedParameter, TensorSource
from hybridserve.parallel.weights.workers import run_on_threads

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all) of checkpoint tensors."""

MAX_NAMED = 5
READ_THREADS = 8
"""At most so many read at once: one alone copies out of the page cache more slowly than a GPU takes it."""


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes."""

    parameter: ShardedParameter
    section: str


@dataclass(frozen=True)
class LoadReport:
    """What a load did."""

    num_tensors: int
    num_bytes: int
    skipped: Mapping[str, int]
    """Reason -> tensors passed over."""


def checkpoint_targets(model: nn.Module, rename: Callable[[str], str]) -> dict[str, Target]:
    """Checkpoint tensor name -> target, for all parameters of `model`.

    A parameter `a.b.qkv_proj.weight` with sections q_proj, k_proj, v_proj is filled from `a.b.q_proj.weight`
    and so on; one with the section "" from its own name. `rename` maps the model's names to the checkpoint's.
    """
    targets: dict[str, Target] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, ShardedParameter), name
        path = name.split(".")
        for section in parameter.sections:
            own = ".".join([*path[:-2], section, path[-1]]) if section else name
            key = rename(own)
            assert key not in targets, key
            targets[key] = Target(parameter, section)
    return targets


def load_checkpoint(
    folder: str | Path,
    targets: Mapping[str, Target],
    skip: Callable[[str], str | None],
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> LoadReport:
    """Load every target from the safetensors in `folder`, reading this shard's slices only.

    `num_threads` read at once, by default one a core and at most `READ_THREADS`. Beside the parameters, each
    takes 16 MiB or less; nothing is read before all names and shapes are known to be right.

    `skip(name)` gives the reason to pass over a tensor that is no target, or None if it must not be there.

    Raises:
        ValueError: a file or tensor is missing, a tensor is extra, misshapen or quantised; named.
    """
    with Checkpoint(folder) as checkpoint:
        skipped = Counter(_check_names(checkpoint, targets, skip))
        # files in turn, so that each is read from front to back
        order = sorted(targets, key=lambda name: checkpoint.weight_map[name])
        sources = [checkpoint.tensor(name) for name in order]
        threads = num_threads or min(READ_THREADS, len(os.sched_getaffinity(0)))
        total = _fill(sources, targets, threads, progress)
    return LoadReport(len(sources), total, dict(skipped))


def load_dummy(targets: Mapping[str, Target], seed: int, progress: Progress | None = None) -> LoadReport:
    """Fill every target with random values that depend on `seed` and the tensor's name alone."""
    sources = [
        DummyTensor(name, target.parameter.checkpoint_shape(target.section), target.parameter.init, seed)
        for name, target in targets.items()
    ]
    # a GPU draws faster than one thread can tell it to, and more would wait for each other
    on_cpu = all(target.parameter.device.type == "cpu" for target in targets.values())
    total = _fill(sources, targets, torch.get_num_threads() if on_cpu else 1, progress)
    return LoadReport(len(sources), total, {})


class _SizedSource(TensorSource, Protocol):
    @property
    def num_bytes(self) -> int: ...


def _fill(
    sources: Sequence[_SizedSource],
    targets: Mapping[str, Target],
    num_threads: int,
    progress: Progress | None,
) -> int:
    """Load every source into its target on `num_threads` threads; return the bytes of all."""
    for source in sources:
        target = targets[source.name]
        target.parameter.check_shape(source, target.section)

    def load(source: _SizedSource) -> None:
        target = targets[source.name]
        target.parameter.weight_loader(source, target.section)

    total, done = sum(source.num_bytes for source in sources), 0
    # the largest first, so that no thread is left with an embedding when the others are done
    order = sorted(sources, key=lambda source: -source.num_bytes)
    devices = {target.parameter.device for target in targets.values()}
    assert len(devices) == 1, devices
    for source in run_on_threads(load, order, num_threads, devices.pop()):
        done += source.num_bytes
        if progress is not None:
            progress(done, total)
    # what the threads took for themselves is the arena's now
    torch.cuda.empty_cache()
    return total


def _check_names(
    checkpoint: Checkpoint, targets: Mapping[str, Target], skip: Callable[[str], str | None]
) -> Iterable[str]:
    """The reasons of all skipped tensors; raises for names on one side only."""
    missing = [name for name in targets if name not in checkpoint.weight_map]
    if missing:
        raise ValueError(f"{checkpoint.folder} lacks {_listed(missing)}, which the model's config asks for")
    others = {name: skip(name) for name in checkpoint.names if name not in targets}
    extra = [name for name, reason in others.items() if reason is None]
    if extra:
        where = checkpoint.weight_map[extra[0]]
        raise ValueError(
            f"{checkpoint.folder} holds {_listed(extra)} (the first in {where}), "
            "which the model's config does not know"
        )
    return [reason for reason in others.values() if reason is not None]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
