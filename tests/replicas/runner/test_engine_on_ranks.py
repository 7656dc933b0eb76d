"""Chunked, batched and preempted requests of every kind on several ranks: the tokens of one rank."""

import runpy
from pathlib import Path

import pytest

from hybridserve.parallel.group import SINGLE

PROGRAM = Path(__file__).with_name("engine_on_ranks.py")
ROOMY, SCARCE = 60, 7
"""Extents that all requests fit in, and that they outgrow on four ranks."""


def numbers(found: object) -> list[float]:
    """All floats of nested lists and tuples, in order."""
    if isinstance(found, float):
        return [found]
    return [x for part in found for x in numbers(part)] if isinstance(found, list | tuple) else []


def without_floats(found: object) -> object:
    if isinstance(found, list | tuple):
        return [without_floats(part) for part in found]
    return None if isinstance(found, float) else found


@pytest.fixture(scope="module")
def expected(demo_model) -> list[tuple]:
    arguments = {"folder": str(demo_model), "split": "heads", "num_extents": ROOMY}
    found, _ = runpy.run_path(str(PROGRAM))["answers"](SINGLE, **arguments)
    assert all(len(tokens) == 14 for tokens, *_ in found)
    return found


@pytest.mark.parametrize(
    ("tp_size", "split", "num_extents"), [(2, "head_v_dim", ROOMY), (4, "heads", SCARCE)]
)
def test_requests(on_ranks, demo_model, expected, tp_size, split, num_extents) -> None:
    options = {"folder": str(demo_model), "split": split, "num_extents": num_extents}
    ranks = on_ranks(tp_size, PROGRAM, "answers", **options)
    for found, preemptions in ranks:
        assert found == ranks[0][0]
        assert without_floats(found) == without_floats(expected)
        assert numbers(found) == pytest.approx(numbers(expected), abs=1e-4)
        assert (preemptions > 0) == (num_extents == SCARCE)
