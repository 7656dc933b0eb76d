"""What every rank of a group computes for `test_tensor_parallel.py`: whole models on fixed prompts.

Also what they tell each other on the way, and what they read of the checkpoint.
"""

import runpy
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.peer_sums import Norm
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.registry import load_model
from hybridserve.replicas.models.sharding import shard_config, with_splits
from hybridserve.replicas.models.specs import ModelConfig

CPU = torch.device("cpu")
KIT = runpy.run_path(str(Path(__file__).with_name("conftest.py")))
PROMPTS = (30, 7, 1)
STEPS = 6


class Wire:
    """A process group that lists what goes through it: (collective, shape, dtype) of a rank's part."""

    def __init__(self, backend: dist.Backend | None) -> None:
        self._backend = backend
        self.calls: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work:
        self._note("all_reduce", tensors)
        return self._backend.allreduce(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> dist.Work:
        self._note("all_gather", inputs)
        return self._backend.allgather(outputs, inputs)

    def _note(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self.calls += [(name, tuple(t.shape), t.dtype) for t in tensors]


class GlooPeers:
    """Sums as peers do that read each other's memory: the residual comes after the sum, on every rank alike,
    and messages of one row are none of theirs."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group
        self.sums = 0

    def takes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return rows > 1 and dtype == torch.float32

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(x.clone())

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.sums += 1
        total = self.all_reduce(x) + residual
        return total, norm(total)


def generate_by_peers(
    group: TensorParallelGroup, folder: str, splits: tuple[str, str]
) -> tuple[torch.Tensor, list[list[int]]]:
    """As `generate`, with sums that are fused with the norms behind them."""
    peers = GlooPeers(group)
    result = generate(replace(group, peers=peers), folder, splits)
    layers = load_model_config(folder).num_layers
    assert peers.sums == 2 * layers * (STEPS + 3), peers.sums
    return result


class GlooExchange:
    """Sums as copy engines make them: begun, ended in order, and no more than two under way."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group
        self._under_way: deque[BegunHere] = deque()
        self.sums = 0

    def takes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        return True

    def begin(self, x: torch.Tensor, residual: torch.Tensor) -> "BegunHere":
        assert x.is_contiguous() and len(self._under_way) < 2
        self._under_way.append(BegunHere(self, x, residual))
        return self._under_way[-1]

    def end(self, begun: "BegunHere", norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        assert begun is self._under_way.popleft()
        self.sums += 1
        total = self._group.all_reduce(begun.x.clone()) + begun.residual
        return total, norm(total)


class BegunHere(NamedTuple):
    exchange: GlooExchange
    x: torch.Tensor
    residual: torch.Tensor

    def end(self, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return self.exchange.end(self, norm)


def generate_in_parts(
    group: TensorParallelGroup, folder: str, splits: tuple[str, str]
) -> tuple[torch.Tensor, list[list[int]]]:
    """As `generate`, every step of two tokens and more that is no decode step in two parts, whose sums are
    begun and ended."""
    return generate(group, folder, splits, overlaps_from=2)


def generate_by_exchange(
    group: TensorParallelGroup, folder: str, splits: tuple[str, str]
) -> tuple[torch.Tensor, list[list[int]]]:
    """As `generate_in_parts`, by what the ranks' copy engines would do."""
    exchange = GlooExchange(group)
    result = generate_in_parts(replace(group, exchange=exchange), folder, splits)
    layers = load_model_config(folder).num_layers
    assert exchange.sums == 2 * 2 * layers * 3, exchange.sums
    return result


def build(
    group: TensorParallelGroup, folder: str, dtype: torch.dtype, splits: tuple[str, str]
) -> tuple[ModelConfig, Any]:
    """The config, and the group's shard of the model with caches of NaN for three sequences."""
    config = with_splits(load_model_config(folder), *splits)
    model = load_model(folder, config, group, dtype, CPU)
    shard = shard_config(config, group.rank, group.size)
    caches = KIT["Caches"](shard, num_sequences=len(PROMPTS), max_len=64, dtype=dtype)
    return config, KIT["Loaded"](model, caches)


def generate(
    group: TensorParallelGroup,
    folder: str,
    splits: tuple[str, str] = ("heads", "intermediate"),
    overlaps_from: int | None = None,
) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits of all steps, and the greedy tokens of three prompts: one alone, cut in two chunks, of which the
    second runs beside another prompt; then decode rows of both beside a third; then rows of all."""
    config, loaded = build(group, folder, torch.float32, splits)
    loaded.model.model.overlaps_from = overlaps_from
    texts = [KIT["random_tokens"](size, config.vocab_size, seed=size) for size in PROMPTS]
    done, out, logits = [0] * len(texts), [[] for _ in texts], []
    vocabulary = loaded.model.vocabulary

    @torch.inference_mode()
    def step(work: list[tuple[int, int]], num_decodes: int) -> None:
        """(sequence, tokens) pairs; the ones that come to their end draw."""
        triples = [(s, texts[s][done[s] : done[s] + n], done[s]) for s, n in work]
        hidden = loaded.model(loaded.caches.batch(triples, num_decodes), loaded.caches.layers)
        own = loaded.model.compute_logits(hidden)
        logits.append(vocabulary.gather(own))
        drawn, _ = vocabulary.greedy(own)
        end = 0
        for s, n in work:
            end, done[s] = end + n, done[s] + n
            if done[s] == len(texts[s]):
                texts[s].append(int(drawn[end - 1]))
                out[s].append(texts[s][-1])

    step([(0, 11)], 0)
    step([(0, 19), (1, 7)], 0)
    step([(0, 1), (1, 1), (2, 1)], 2)
    for _ in range(STEPS):
        step([(0, 1), (1, 1), (2, 1)], 3)
    return torch.cat(logits), out


def wire(group: TensorParallelGroup, folder: str, splits: tuple[str, str]) -> list[list[tuple]]:
    """What one rank sends in a step of two prompts, 5 tokens and 1, and in a decode step of both, in bf16,
    with two greedy draws each."""
    backend = Wire(group.backend)
    config, loaded = build(
        TensorParallelGroup(group.rank, group.size, backend), folder, torch.bfloat16, splits
    )
    found = []
    for work, num_decodes in (
        ([(0, [1, 2, 3, 4, 5], 0), (1, [7], 0)], 0),
        ([(0, [6], 5), (1, [8], 1)], 2),
    ):
        backend.calls.clear()
        with torch.inference_mode():
            hidden = loaded.model(loaded.caches.batch(work, num_decodes), loaded.caches.layers)
            own = loaded.model.compute_logits(hidden[-2:])
            loaded.model.vocabulary.greedy(own)
        found.append(list(backend.calls))
    return found
