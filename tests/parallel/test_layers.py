"""Sharded layers on 2 and 4 gloo processes against the same layers on one."""

import runpy
from pathlib import Path

import pytest
import torch

from hybridserve.parallel.group import SINGLE

PROGRAM = Path(__file__).with_name("layers_on_ranks.py")


@pytest.mark.parametrize("tp_size", [2, 4])
def test_several_ranks_equal_one(on_ranks, tp_size) -> None:
    expected = runpy.run_path(str(PROGRAM))["results"](SINGLE)
    for found in on_ranks(tp_size, PROGRAM, "results"):
        assert found.keys() == expected.keys()
        for layer, result in found.items():
            torch.testing.assert_close(result, expected[layer], rtol=1e-5, atol=1e-6, msg=layer)
