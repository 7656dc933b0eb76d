import pytest

from hybridserve.parallel.comm_benchmark.formulas import (
    algbw,
    busbw,
    percentile,
    rank_counts,
    sweep_sizes,
    wire_factor,
)
from hybridserve.parallel.comm_benchmark.settings import LayerShape, make_settings, model_messages

LAYER = LayerShape("9b", 4096, 16, 32, 128, 128)


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(collective, ranks, factor) -> None:
    assert wire_factor(collective, ranks) == factor
    assert algbw(2_000_000, 0.001) == 2e9
    assert busbw(collective, 2_000_000, 0.001, ranks) == 2e9 * factor


def test_bandwidth_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="got 'broadcast'"):
        wire_factor("broadcast", 2)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        wire_factor("all_reduce", 0)


def test_sizes_are_powers_of_two_up_to_the_cap() -> None:
    sizes = sweep_sizes()
    assert sizes[0] == 1024 and sizes[-1] == 256 * 2**20 and len(sizes) == 19
    assert all(b == 2 * a for a, b in zip(sizes, sizes[1:], strict=False))
    assert sweep_sizes(10_000) == (1024, 2048, 4096, 8192)
    with pytest.raises(ValueError, match="max_size must be at least 1024 bytes, got 1023"):
        sweep_sizes(1023)


@pytest.mark.parametrize(("tp", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_rank_counts(tp, counts) -> None:
    assert rank_counts(tp) == counts


def test_percentiles_are_measured_values() -> None:
    times = [float(i) for i in range(1, 101)]
    assert [percentile(times, p) for p in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert percentile([3.0, 1.0], 99) == 3.0 and percentile([2.0], 50) == 2.0


def test_messages_of_the_model() -> None:
    settings = make_settings(LAYER, backend="nccl", tp_size=4)
    found = {(collective, label): size for collective, label, size in model_messages(settings)}
    assert found["all_reduce", "hidden x 1"] == 8192
    assert found["all_reduce", "hidden x 8,192"] == 64 * 2**20
    assert found["all_gather", "projections x 32"] == 32 * (8192 + 4096 + 64) * 2
    assert found["reduce_scatter", "hidden x 256"] == 2 * 2**20
    capped = model_messages(make_settings(LAYER, backend="nccl", tp_size=4, max_bytes=2**20))
    assert max(size for _, _, size in capped) <= 2**20


def test_replays_are_a_thousand_unless_quick() -> None:
    assert make_settings(LAYER, backend="nccl", tp_size=2).max_replays == 1000
    assert make_settings(LAYER, backend="nccl", tp_size=2, row_seconds=0.2).row_seconds == 0.2
    quick = make_settings(LAYER, backend="gloo", tp_size=2, quick=True)
    assert quick.max_replays == 20 and quick.layer.hidden_size == 256 and quick.layer.num_v_heads == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 0}, "tp must be at least 1, got 0"),
        ({"backend": "mpi"}, "backend must be one of gloo, nccl, got 'mpi'"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"row_seconds": 0.0}, "row_seconds must be above 0, got 0"),
        ({"row_seconds": float("nan")}, "row_seconds must be above 0, got nan"),
        ({"sizes": (4,)}, "sizes: a message must be at least 8 bytes at tp 2, got 4"),
    ],
)
def test_settings_name_what_is_wrong(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_settings(LAYER, **{"backend": "gloo", "tp_size": 2, **changes})
