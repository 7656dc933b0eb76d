"""Products of 2 to 32 tokens with a weight on tensor cores: the weight streams, the tokens are padded.

Owns the tiles, and the sum over parts of K where a weight has too few rows to keep the memory busy: each part
writes its sums, and the last one to end adds them in the order of the parts, so a result is the same every
time. Knows nothing of layers, nor for which shapes this form is the faster one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_TOKENS = 32
LINE_BYTES = tl.constexpr(128)
"""Of the L2 cache."""


@dataclass(frozen=True)
class SkinnyTile:
    """What one program computes: `rows` rows of the weight over one of `parts` parts of K."""

    rows: int = 64
    columns: int = 128
    stages: int = 4
    parts: int = 1
    num_warps: int = 4


@triton.jit
def _fetch(rows, first, K, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, LINE: tl.constexpr):
    """Ask for `STAGES` tiles of the weight's rows to come to the L2 cache. LINE: elements of one line."""
    LINES: tl.constexpr = BLOCK_K // LINE if BLOCK_K > LINE else 1
    for stage in tl.static_range(STAGES):
        cols = tl.minimum(first + stage * BLOCK_K + tl.arange(0, LINES) * LINE, K - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [rows[:, None] + cols[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["num_tokens", "N"])
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    num_tokens,
    N,
    K,
    x_stride,
    weight_stride,
    residual_stride,
    out_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
    READ_AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    block = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    rows = block * ROWS + tl.arange(0, ROWS)
    # rows past the end read the last one and are not written
    held = tl.minimum(rows, N - 1).to(tl.int64)
    cols = tl.arange(0, BLOCK_K)
    tokens = tl.arange(0, TOKENS)
    part_k = tl.cdiv(tl.cdiv(K, BLOCK_K), PARTS) * BLOCK_K
    first = part * part_k
    last = tl.minimum(first + part_k, K)
    if DEPENDENT:
        if READ_AHEAD:
            LINE: tl.constexpr = LINE_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
            _fetch(weight_ptr + held * weight_stride, first, K, BLOCK_K, STAGES, LINE)
            if GATED:
                _fetch(weight_ptr + (held + N) * weight_stride, first, K, BLOCK_K, STAGES, LINE)
        tl.extra.cuda.gdc_wait()
    weight_at = weight_ptr + held[:, None] * weight_stride + cols[None, :]
    up_at = weight_ptr + (held + N)[:, None] * weight_stride + cols[None, :]
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * x_stride + cols[:, None]
    token_mask = (tokens < num_tokens)[None, :]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    up_sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            weight = tl.load(weight_at + k, eviction_policy="evict_first")
            x = tl.load(x_at + k, token_mask, other=0.0)
        else:
            inside = k + cols < K
            weight = tl.load(weight_at + k, inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at + k, token_mask & inside[:, None], other=0.0)
        sums = tl.dot(weight, x, sums)
        if GATED:
            if EVEN_K:
                up = tl.load(up_at + k, eviction_policy="evict_first")
            else:
                up = tl.load(up_at + k, (k + cols < K)[None, :], other=0.0, eviction_policy="evict_first")
            up_sums = tl.dot(up, x, up_sums)
    if DEPENDENT:
        # not before: all programs run at once, and the next kernel's would crowd where the first ones end
        tl.extra.cuda.gdc_launch_dependents()
    if PARTS > 1:
        at = tl.arange(0, ROWS)[:, None] * TOKENS + tokens[None, :]
        tl.store(partial_ptr + (block * PARTS + part).to(tl.int64) * (ROWS * TOKENS) + at, sums)
        # all threads' sums are written before one thread counts this part
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + block, 1, sem="acq_rel", scope="gpu") < PARTS - 1:
            return
        sums = tl.zeros([ROWS, TOKENS], tl.float32)
        for i in tl.static_range(PARTS):
            other = partial_ptr + (block * PARTS + i).to(tl.int64) * (ROWS * TOKENS)
            sums += tl.load(other + at, cache_modifier=".cg")
        tl.store(count_ptr + block, 0)
    y = sums
    if GATED:
        y = y / (1 + tl.exp(-y)) * up_sums
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, rows < N, other=0.0).to(tl.float32)[:, None]
    mask = (rows < N)[:, None] & token_mask
    if HAS_RESIDUAL:
        at = tokens.to(tl.int64)[None, :] * residual_stride + rows[:, None]
        y += tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
    at = tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask)


_workspaces: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}


def _workspace(device: torch.device, sums: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 sums of parts, int32 counts that are 0 between launches), shared by all launches of a device.

    Those launches must therefore follow one another, in one stream or by events. A larger pair does not
    replace a smaller one, whose addresses captured graphs hold.
    """
    held = _workspaces.setdefault(device, [])
    for partial, counts in held:
        if partial.numel() >= sums and counts.numel() >= blocks:
            return partial, counts
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first product in parts must run before a CUDA graph is captured")
    # room for 264 programs of 64 rows x 32 tokens
    partial = torch.empty(max(sums, 1 << 20), dtype=torch.float32, device=device)
    held.append((partial, torch.zeros(max(blocks, 1 << 10), dtype=torch.int32, device=device)))
    return held[-1]


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    dependent: bool = False,
    read_ahead: bool = False,
    tile: SkinnyTile | None = None,
) -> None:
    """out = x W^T (+ bias) (+ residual) of 1 to 32 tokens, summed in fp32 and rounded once.

    x: [T, K]. weight: [N, K] in the dtype of x. bias: [N]. residual, out: [T, N]. Last axes dense; out in any
        float dtype.
    gated: weight is [2N, K], rows of gate first, and out = silu(gate) * up.
    dependent: launch before the kernel ahead in the stream has ended (programmatic dependent launch).
    read_ahead: then, fetch the first tiles of the weight into the L2 cache before waiting for that kernel.
    """
    (tokens, k), rows = x.shape, out.shape[1]
    assert tokens <= MAX_TOKENS and out.shape[0] == tokens and weight.shape == ((2 if gated else 1) * rows, k)
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1 and weight.dtype == x.dtype
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)
    if not tokens:
        return
    tile = tile or SkinnyTile()
    padded = max(16, triton.next_power_of_2(tokens))
    blocks = triton.cdiv(rows, tile.rows)
    partial, counts = out, out
    if tile.parts > 1:
        assert not gated, "the gate needs whole sums"
        partial, counts = _workspace(x.device, blocks * tile.parts * tile.rows * padded, blocks)
    _skinny_kernel[(blocks * tile.parts,)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        partial,
        counts,
        tokens,
        rows,
        k,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        TOKENS=padded,
        ROWS=tile.rows,
        BLOCK_K=tile.columns,
        PARTS=tile.parts,
        EVEN_K=k % tile.columns == 0,
        GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        DEPENDENT=dependent,
        READ_AHEAD=dependent and read_ahead,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        **({"launch_pdl": True} if dependent else {}),
    )
