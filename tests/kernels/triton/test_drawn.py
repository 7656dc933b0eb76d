"""Feeding a step with what the step before it drew: the launches against the plain form, which is obvious."""

import pytest
import torch

from hybridserve.kernels.sampler import drawn as plain
from hybridserve.kernels.sampler import triton_drawn
from hybridserve.kernels.testing import poisoned_memory

# a whole block of a launch and some, one, and none
COUNTS = (triton_drawn.BLOCK + 5, 1, 0)


@pytest.mark.parametrize("count", COUNTS)
def test_tokens_are_taken_from_where_they_were_drawn(device, count):
    token_ids, drawn = torch.arange(count) + 1000, torch.randperm(3000)
    sources = torch.randint(-3, 3000, (count,))
    sources[::3] = -1
    expected = torch.where(sources < 0, token_ids, drawn[sources])
    assert torch.equal(plain.take_drawn(token_ids, drawn, sources), expected)
    with poisoned_memory():
        taken = triton_drawn.take_drawn(token_ids.to(device), drawn.to(device), sources.to(device))
    assert torch.equal(taken.cpu(), expected)


@pytest.mark.parametrize("count", COUNTS)
def test_draws_are_kept_and_nothing_behind_them_is_touched(device, count):
    tokens, finite = torch.randint(2**40, (count,)), torch.randint(2, (count,)) > 0
    expected = torch.full((2, count + 7), -5)
    kept = expected.clone().to(device)
    expected[0, :count], expected[1, :count] = tokens, finite
    triton_drawn.keep_drawn(tokens.to(device), finite.to(device), kept)
    assert torch.equal(kept.cpu(), expected)
    ours = torch.full((2, count + 7), -5)
    plain.keep_drawn(tokens, finite, ours)
    assert torch.equal(ours, expected)
