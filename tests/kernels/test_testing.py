"""The measuring stick itself."""

import pytest
import torch

from hybridserve.kernels.testing import (
    Work,
    assert_as_good_as_plain,
    poisoned_memory,
    relative_error,
    rotations,
)
from hybridserve.kernels.varlen import varlen_tables


def test_relative_error_is_that_of_norms_and_never_forgives_a_nan():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(truth.float(), truth) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, float("nan")]), truth) == float("inf")


def test_a_result_twice_as_wrong_as_plain_pytorch_is_the_limit():
    truth = torch.ones(1000, dtype=torch.float64)
    plain = (truth + 1e-3).float()
    assert_as_good_as_plain((truth + 1.9e-3).float(), plain, truth)
    with pytest.raises(AssertionError, match="at most"):
        assert_as_good_as_plain((truth + 2.1e-3).float(), plain, truth)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_plain_pytorch_that_is_broken_too_excuses_nothing(broken):
    truth = torch.ones(3, dtype=torch.float64)
    out = torch.tensor([1.0, broken, 1.0])
    with pytest.raises(AssertionError, match="error inf"):
        assert_as_good_as_plain(out, out, truth)


def test_poisoned_memory_fills_what_is_not_written_and_ends():
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.zeros(2, dtype=torch.bfloat16)).isnan().all()
        assert (torch.empty(2, dtype=torch.int32) == 2**31 - 1).all()
    assert not torch.empty(3).fill_(1).isnan().any()


def test_the_floor_is_the_larger_term():
    assert Work(nbytes=4_300_000).floor_us() == pytest.approx(1.0)
    assert Work(nbytes=1, flops=790_000_000).floor_us() == pytest.approx(1.0)
    assert rotations(2**30) == 2
    assert rotations(2**20) == 180


def test_varlen_tables_name_every_chunk_once():
    tables = varlen_tables((130, 0, 64, 1), 64, torch.device("cpu"))
    assert tables.cu_seqlens.tolist() == [0, 130, 130, 194, 195]
    assert tables.chunk_seqs.tolist() == [0, 0, 0, 2, 3]
    assert tables.chunk_ids.tolist() == [0, 1, 2, 0, 0]
    assert tables.max_query_len == 130
    assert varlen_tables((130, 0, 64, 1), 64, torch.device("cpu")) is tables
