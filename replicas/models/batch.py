"""What a forward pass takes: the flat tensors of one step, and each layer's views of the arena.

Filled by the runner, read by the model's mixers. Knows nothing of requests or queues.
"""

from dataclasses import dataclass

import torch

from hybridserve.kernels.linear_attention.replay import ReplayRing


@dataclass(frozen=True)
class ReplayRows:
    """Where the replay rings of B decode rows stand; see `gdn_decode_replay`.

    counts: int64 [B], entries before the step. flushes: bool [B], whether the step empties the ring.
    """

    counts: torch.Tensor
    flushes: torch.Tensor


@dataclass(frozen=True)
class StepBatch:
    """T tokens of S sequences, flat; sequences in recurrent form ("decode rows") come first.

    A decode row has exactly one token and a state to go on from, so row i's token is token i. Every other
    sequence ("prefill chunk") has one token or more, with or without earlier context.
    """

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T], position of each token in its sequence; negative for rows of padding."""
    num_decodes: int
    query_lens: tuple[int, ...]
    """[S] tokens of each sequence in this step; the first `num_decodes` are 1."""
    context_lens: tuple[int, ...]
    """[S] tokens of each sequence computed before this step."""
    has_initial_state: torch.Tensor
    """bool [S]: context_lens > 0. Where False the unit's bytes are garbage and must not be read."""
    state_indices: torch.Tensor
    """int64 [S] row of `StateCache.recurrent` and `.conv`; unused by models without linear layers."""
    block_tables: torch.Tensor
    """int64 [S, max_pages] rows of `KVCache.keys` and `.values`, one a page; 0 past a sequence's pages."""
    slot_mapping: torch.Tensor
    """int64 [T]: row of `KVCache.key_slots`/`value_slots` where each token's K and V go."""
    logits_indices: torch.Tensor | None
    """int64 [R] tokens whose logits are wanted; None: of all."""
    replay: ReplayRows | None = None
    """Of the decode rows, in an arena with replay rings."""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True)
class KVCache:
    """One full-attention layer's K and V in the arena, as views with the layer's offset inside them.

    keys, values: [N, page_size, num_kv_heads, head_dim], row = `block_table` entry.
    key_slots, value_slots: the same as [N * page_size, num_kv_heads, head_dim], row = `slot_mapping` entry.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_slots: torch.Tensor
    value_slots: torch.Tensor


@dataclass(frozen=True)
class StateCache:
    """One linear-attention layer's states in the arena.

    Rows are windows that start at every 256 bytes, so they overlap; only those in `state_indices` are real.
    recurrent: the spec's state_dtype [N, num_v_heads, head_v_dim, head_k_dim] (S[v, k]).
    conv: model dtype [N, kernel, conv_dim], a ring of the last `kernel` inputs of the convolution, position p
        in column p % kernel; after any step of a sequence all columns are defined, zero before position 0.
    replay: rings of inputs that `recurrent` lacks yet, in an arena with room for them; the value is both.
    """

    recurrent: torch.Tensor
    conv: torch.Tensor
    replay: ReplayRing | None = None


LayerCache = KVCache | StateCache
