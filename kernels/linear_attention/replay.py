"""The replay ring: the last inputs of a recurrence, kept so that its state is written once in many steps.

The value of a sequence's state is S + ring. Owns the ring's shape and the rule of when it is folded into S.
Knows nothing of where rings are stored, or of the device. The derivation is in this folder's README.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

REPLAY_WINDOW = 16
"""Steps from one write of a state to the next; a power of two."""

Ints = TypeVar("Ints", int, torch.Tensor)


@dataclass(frozen=True)
class ReplayRing:
    """One layer's rings, rows as the states' are. Entry j of a row is its j-th token since S was written.

    k: model dtype [N, num_k_heads, window, head_k_dim], not normalised: it is then just what the convolution
        gave, which is of the model's dtype, so nothing is lost.
    u: fp32 [N, num_v_heads, window, head_v_dim], the update over the norm of k, so that S gets u outer k.
    g: fp32 [N, num_v_heads, window], the token's log decay.
    """

    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor

    @property
    def window(self) -> int:
        return self.g.shape[2]


def replay_entries(
    recurrent_tokens: np.ndarray, stagger: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """(entries in a row's ring before a step, whether the step folds the ring and its own token into S).

    recurrent_tokens: int64 [B], tokens since S was last whole (after a prefill). stagger: int64 [B], constant
        for a row as long as its ring lives, wherever its unit lies. A row flushes once in `window` steps, the
        first time after `window - stagger % window`. What this returns follows from the row alone.
    """
    cycle = (recurrent_tokens + stagger % window) % window
    return np.minimum(recurrent_tokens, cycle), cycle == window - 1


def replay_flushes(counts: Ints, positions: Ints, state_indices: Ints, window: int = REPLAY_WINDOW) -> Ints:
    """Whether a step folds the ring and its own token into S, leaving the ring empty; else it adds an entry.

    counts: valid entries before the step, < window: the tokens since S was written, whoever wrote it (prefill
        and `flush_replay` leave 0). positions: of the step's token. state_indices: row of the state.
    All int64 tensors of one shape, or all plain ints. A row flushes once in `window` steps, at positions that
    its state index staggers, and earlier where its ring would overflow: only the count must be right, so a
    sequence may join, move to another unit or be copied (with its count) at any step. After the step a row's
    count is 0 where this is true, and one more where it is not.
    """
    # the top bits of a multiplicative hash: units lie at multiples of large powers of two
    stagger = ((state_indices * 0x9E3779B1) % 2**32 * window) // 2**32
    return (counts + 1 >= window) | ((positions + 1 + stagger) % window == 0)
