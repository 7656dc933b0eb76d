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


LENGTHS = (
    *(2, 3, 4, 10, 64, 66, 67, 130, 2100, 4096, 8192, 8300, 11777, 11778, 11800, 11839, 11840, 12300, 16384),
    *(25000, 28162, 28225, 31747, 31810, 32768, 33000, 131072),
)


@pytest.mark.parametrize("chunk", [1, 32, 2048, 4096, 7000, 8000, 8191, 8192, 16384])
@pytest.mark.parametrize("max_model_len", LENGTHS)
def test_every_kind_of_prefill_is_among_them(chunk: int, max_model_len: int) -> None:
    chunk = min(chunk, max_model_len - 1)
    rehearsed = [one for size in prefill_sizes(chunk) for one in lone_prefills(size, max_model_len)]
    assert all(1 <= new <= chunk and new + before < max_model_len for new, before in rehearsed)
    there_may_be = {
        kind(new, before)
        for new in (2, 64, 1000, 3584, 4000, 4096, 7168, 8192, chunk)
        for piece in (0, PIECE, 2 * PIECE, 3 * PIECE, 12 * PIECE)
        for before in (piece, piece + 1, piece + 10, piece + 64, piece + PIECE - 1)
        if 2 <= new <= chunk and new + before < max_model_len
    }
    # prefills of few tokens without a context are other steps' of the rehearsal
    assert there_may_be - {(False, False, False)} <= {kind(*one) for one in rehearsed}


def test_the_longest_are_among_them() -> None:
    """By which the memory is measured that a step takes."""
    assert lone_prefills(8192, 131072) == [(8192, 0), (8192, 64), (8192, 24576), (8192, 24640)]
    assert lone_prefills(8191, 8192) == [(8191, 0), (8127, 64)]
