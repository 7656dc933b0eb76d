"""Which steps are rehearsed: one of each kind that there may be."""

import pytest
import torch

from hybridserve.kernels.attention.choice import CONTEXT_PIECES, takes_fused
from hybridserve.replicas.runner.rehearsal import lone_prefills, prefill_sizes

PIECE = CONTEXT_PIECES[-1]


def kind(new: int, before: int) -> tuple[bool, bool, bool]:
    """What attention's launches depend on: whether cuDNN takes part, and which parts a context has."""
    fused = takes_fused(256, torch.bfloat16, new, before, None)
    return (True, before >= PIECE, before % PIECE > 0) if fused else (False, False, before > 0)


@pytest.mark.parametrize("chunk", [8192, 8191, 8000, 7000, 4096, 2048, 16384])
@pytest.mark.parametrize(
    "max_model_len", [2100, 4096, 8192, 8300, 11800, 12300, 16384, 25000, 32768, 33000, 131072]
)
def test_every_kind_of_prefill_is_among_them(chunk: int, max_model_len: int) -> None:
    chunk = min(chunk, max_model_len - 1)
    rehearsed = [one for size in prefill_sizes(chunk) for one in lone_prefills(size, max_model_len)]
    assert all(2 <= new <= chunk and new + before < max_model_len for new, before in rehearsed)
    there_may_be = {
        kind(new, before)
        for new in (2, 64, 1000, 3584, 4000, 4096, 7168, 8192, chunk)
        for before in (0, 1, 64, 100, 4096, PIECE - 1, PIECE, PIECE + 64, 16384, 20000, 24576, 24640, 100000)
        if new <= chunk and new + before < max_model_len
    }
    # prefills of few tokens without a context are other steps' of the rehearsal
    assert there_may_be - {(False, False, False)} <= {kind(*one) for one in rehearsed}


def test_a_budget_of_one_token_has_no_prefill_with_a_context() -> None:
    assert lone_prefills(63, 64) == [(63, 0)]
