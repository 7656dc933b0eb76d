"""The second part of the benchmark: what communication costs each strategy of a linear-attention layer.

A strategy's step is timed twice in turn, as it is and with its collectives left out, after its output and its
state have been compared with the whole layer computed on one rank.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from hybridserve.kernels.linear import linear
from hybridserve.parallel.comm_benchmark.counting import CountedCall
from hybridserve.parallel.comm_benchmark.mixer import LayerWeights, Mixer, Part, random_weights, whole
from hybridserve.parallel.comm_benchmark.settings import BenchmarkSettings, Case
from hybridserve.parallel.comm_benchmark.strategies import STRATEGIES, Strategy
from hybridserve.parallel.comm_benchmark.sweep import DTYPES
from hybridserve.parallel.comm_benchmark.timing import Meeting, Step, Times, capture, measure
from hybridserve.parallel.comm_benchmark.wire import GroupWire, NoWire, Wire
from hybridserve.parallel.group import TensorParallelGroup

# |y - whole| / |whole|: sums in another order, and one more rounding to the dtype on the way
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# copies of the layer in turn read their weights from memory, as a model's layers do, not from a GPU's cache;
# in a prefill that makes no difference
_COLD_BYTES = 128 * 2**20
_MOST_COPIES = 8


def shares(
    settings: BenchmarkSettings, group: TensorParallelGroup, device: torch.device
) -> list[dict[str, Any]]:
    """A row for each case, strategy and mode; one that this shape does not allow says why."""
    dtype = DTYPES[settings.dtype]
    weights = random_weights(settings.layer, dtype, device, settings.seed + 1)
    return [row for case in settings.cases for row in _of_case(settings, group, weights, case)]


def _of_case(
    settings: BenchmarkSettings, group: TensorParallelGroup, weights: LayerWeights, case: Case
) -> list[dict[str, Any]]:
    shape, device = settings.layer, weights.in_proj.device
    generator = torch.Generator(device).manual_seed(settings.seed + 2)
    x = torch.empty(case.tokens, shape.hidden_size, dtype=weights.in_proj.dtype, device=device)
    x.normal_(generator=generator)
    expected, state = whole_layer(settings, weights, case, x)
    rows = []
    for make in STRATEGIES:
        if case.phase not in make.phases or group.size < make.least_ranks:
            continue
        about = {"strategy": make.name, "case": case.name, "phase": case.phase, "tokens": case.tokens}
        about |= {"sequences": case.sequences, "ranks": group.size}
        why = make.unavailable(shape, group.size, device.type == "cuda")
        if why is not None:
            rows.append({**about, "unavailable": why})
            continue

        def build(make: type = make) -> Strategy:
            return make(shape, weights, case, group.rank, group.size)

        rows += [{**about, **row} for row in _measured(settings, group, build, case, x, expected, state)]
    return rows


def whole_layer(
    settings: BenchmarkSettings, weights: LayerWeights, case: Case, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer without ranks: x [T, hidden] and its output, the states after it, fp32 [N, Hv, V, K]."""
    mixer = Mixer(settings.layer, whole(settings.layer), weights, case)
    output = linear(mixer.mix(linear(x, weights.in_proj)), weights.out_proj, residual=x)
    return output, mixer.state


def _measured(
    settings: BenchmarkSettings,
    group: TensorParallelGroup,
    build: Callable[[], Strategy],
    case: Case,
    x: torch.Tensor,
    expected: torch.Tensor,
    expected_state: torch.Tensor,
) -> list[dict[str, Any]]:
    strategy = build()
    wire = GroupWire(group)
    output, normed = strategy.step((x.clone(), x), wire)
    calls = tuple(wire.counter.calls)
    part, state = strategy.kept_state()
    error = max(
        _error(output, expected),
        _error(normed, strategy.norm(expected)),
        _error(state, state_of(expected_state, part)),
    )
    if not error <= TOLERANCE[x.dtype]:
        raise ArithmeticError(
            f"{strategy.name} of {x.shape[0]} tokens on rank {group.rank} of {group.size} differs from the "
            f"whole layer by {error:.3g}, at most {TOLERANCE[x.dtype]:.3g} is allowed"
        )
    copies = [strategy]
    if x.is_cuda and case.phase == "decode":
        copies += [build() for _ in range(_further_copies(strategy))]
    elif case.phase == "prefill":
        copies += [build() for _ in range(strategy.chained_copies - 1)]
    strategy.run(copies, (x.clone(), x), wire)
    rows = []
    for mode, with_it, without in _modes(copies, case, x, wire):
        times = measure(
            [with_it, without],
            Meeting(group, x.device),
            row_seconds=settings.row_seconds,
            min_replays=settings.min_replays,
            max_replays=settings.max_replays,
        )
        rows.append({"mode": mode, **_share(times, len(copies)), **_bytes(calls, x.shape[0], group.size)})
    common = {"state_bytes_per_rank": state.numel() * 4, "max_relative_error": error}
    return [{**row, **common} for row in rows]


def state_of(state: torch.Tensor, part: Part) -> torch.Tensor:
    """A part's heads of the whole layer's state."""
    heads = torch.tensor(part.v_heads, device=state.device)
    return state[:, heads, part.first_v : part.first_v + part.num_v]


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|; inf where something is not a number."""
    error = ((got.float() - expected.float()).norm() / expected.float().norm()).item()
    return math.inf if math.isnan(error) else error


def _further_copies(strategy: Strategy) -> int:
    tensors = [t for t in vars(strategy).values() if isinstance(t, torch.Tensor)]
    held = sum(t.numel() * t.element_size() for t in tensors) + strategy.kept_state()[1].numel() * 4
    return min(_MOST_COPIES, max(1, math.ceil(_COLD_BYTES / held))) - 1


def _modes(copies: list[Strategy], case: Case, x: torch.Tensor, wire: Wire) -> list[tuple[str, Step, Step]]:
    """(mode, the copies' steps with their collectives, and without)."""

    # grows with every replay, which changes no time
    stream = x.clone()

    def through(used: Wire) -> Step:
        return lambda: copies[0].run(copies, (stream, x), used)

    with_it, without = through(wire), through(NoWire())
    modes = [("eager", with_it, without)]
    # a prefill's lengths come from the host, so no graph can hold it: the engine launches it likewise
    if x.is_cuda and case.phase == "decode":
        modes.append(("graph", capture(with_it), capture(without)))
    return modes


def _share(times: tuple[Times, ...], copies: int) -> dict[str, Any]:
    """Times are a layer's. The bound of overlap: all of the shorter of the two hidden behind the longer."""
    total, compute = times[0].p50_us / copies, times[1].p50_us / copies
    communication = total - compute

    def per_layer(t: Times) -> dict[str, float]:
        return Times(t.replays, *(round(v / copies, 3) for v in (t.p50_us, t.p90_us, t.p99_us))).as_json()

    return {
        "with_communication": per_layer(times[0]),
        "compute_only": per_layer(times[1]),
        "communication_us": communication,
        "share": communication / total,
        "overlap_bound_us": max(compute, communication),
        "layer_copies": copies,
    }


def _bytes(calls: tuple[CountedCall, ...], tokens: int, ranks: int) -> dict[str, Any]:
    messages = [
        {
            "label": c.label,
            "collective": c.collective,
            "bytes": c.num_bytes,
            "wire_bytes": c.wire_bytes(ranks),
        }
        for c in calls
    ]
    return {
        "messages": messages,
        "message_bytes_per_token": sum(c.num_bytes for c in calls) / tokens,
        "wire_bytes_per_token": sum(c.wire_bytes(ranks) for c in calls) / tokens,
        "state_wire_bytes": sum(c.wire_bytes(ranks) for c in calls if c.label == "state"),
    }
