"""Products of up to 64 tokens with a weight on tensor cores: the weight streams, the tokens are padded.

Owns the tiles, and the sum over parts of K where a weight has too few rows to keep the memory busy: each part
writes its sums, and the last one to end adds them in the order of the parts, so a result is the same every
time. Knows nothing of layers, nor which form is the faster one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_TOKENS = 64


@dataclass(frozen=True)
class SkinnyTile:
    """What one program computes: `rows` rows of the weight over one of `parts` parts of K."""

    rows: int = 64
    columns: int = 128
    stages: int = 4
    parts: int = 1
    num_warps: int = 4
    ahead: int = 4
    """Tiles of the weight asked into the L2 before the kernel waits for the one that writes x."""


@triton.jit
def _prefetch(at, stride, mask, lines: tl.constexpr):
    """Ask for the first `lines` times 64 columns of rows that start at `at` into the L2. at: [rows]."""
    for i in tl.static_range(lines):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(at + i * 64).to(tl.int64)],
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
    norm_ptr,
    out_ptr,
    partial_ptr,
    count_ptr,
    num_tokens,
    N,
    K,
    eps,
    x_stride,
    weight_stride,
    residual_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
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
        _prefetch(weight_ptr + held * weight_stride + first, weight_stride, rows, AHEAD * BLOCK_K // 64)
        if GATED:
            _prefetch(weight_ptr + (held + N) * weight_stride + first, weight_stride, rows, AHEAD * BLOCK_K // 64)
        tl.extra.cuda.gdc_wait()
    weight_at = weight_ptr + held[:, None] * weight_stride + cols[None, :]
    up_at = weight_at + N.to(tl.int64) * weight_stride
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * x_stride + cols[:, None]
    token_mask = (tokens < num_tokens)[None, :]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    up_sums = tl.zeros([ROWS, TOKENS], tl.float32)
    squares = tl.zeros([BLOCK_K, TOKENS], tl.float32)
    for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            weight = tl.load(weight_at + k, eviction_policy="evict_first")
            x = tl.load(x_at + k, token_mask, other=0.0)
        else:
            inside = k + cols < K
            weight = tl.load(weight_at + k, inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at + k, token_mask & inside[:, None], other=0.0)
        if NORMED:
            scale = tl.load(norm_ptr + k + cols, k + cols < K, other=0.0).to(tl.float32)
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * scale[:, None]).to(weight.dtype)
        sums = tl.dot(weight, x, sums)
        if GATED:
            if EVEN_K:
                up = tl.load(up_at + k, eviction_policy="evict_first")
            else:
                up = tl.load(up_at + k, (k + cols < K)[None, :], other=0.0, eviction_policy="evict_first")
            up_sums = tl.dot(up, x, up_sums)
    if PARTS > 1:
        at = (tl.arange(0, ROWS)[:, None] * TOKENS) + tokens[None, :]
        mine = partial_ptr + (block * PARTS + part).to(tl.int64) * (ROWS * TOKENS)
        tl.store(mine + at, sums)
        # all threads' sums are written before one thread counts this part
        tl.debug_barrier()
        ended = tl.atomic_add(count_ptr + block, 1, sem="acq_rel", scope="gpu")
        if ended < PARTS - 1:
            return
        sums = tl.zeros([ROWS, TOKENS], tl.float32)
        for i in tl.static_range(PARTS):
            other = partial_ptr + (block * PARTS + i).to(tl.int64) * (ROWS * TOKENS)
            sums += tl.load(other + at, cache_modifier=".cg")
        tl.store(count_ptr + block, 0)
    y = sums
    if NORMED:
        norm = tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
        y *= norm
        up_sums *= norm
    if GATED:
        y = y / (1 + tl.exp(-y)) * up_sums
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, rows < N, other=0.0).to(tl.float32)[:, None]
    mask = (rows < N)[:, None] & token_mask
    if HAS_RESIDUAL:
        at = tokens.to(tl.int64)[None, :] * residual_stride + rows[:, None]
        y += tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + tokens.to(tl.int64)[None, :] * N + rows[:, None], y.to(out_ptr.dtype.element_ty), mask)


_workspaces: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _workspace(device: torch.device, sums: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 sums of parts, int32 counts that are 0 between launches); kept, as graphs hold their addresses."""
    held = _workspaces.get(device)
    if held is None or held[0].numel() < sums or held[1].numel() < blocks:
        sums, blocks = max(sums, 1 << 22), max(blocks, 1 << 12)
        counts = torch.zeros(blocks, dtype=torch.int32, device=device)
        _workspaces[device] = torch.empty(sums, dtype=torch.float32, device=device), counts
    return _workspaces[device]


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    dependent: bool = False,
    out_dtype: torch.dtype | None = None,
    tile: SkinnyTile | None = None,
) -> torch.Tensor:
    """x W^T (+ bias) (+ residual) of 1 to 64 tokens, summed in fp32. Arguments as those of `gemv`.

    With `norm_weight`, x times the weight is rounded to its dtype before the product, as the output of a norm is.
    """
    tokens, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(tokens, n, dtype=out_dtype or x.dtype, device=x.device)
    tile = tile or SkinnyTile()
    if not tokens:
        return out
    padded = max(16, triton.next_power_of_2(tokens))
    blocks = triton.cdiv(n, tile.rows)
    partial, counts = out, out
    if tile.parts > 1:
        assert not gated and norm_weight is None
        partial, counts = _workspace(x.device, blocks * tile.parts * tile.rows * padded, blocks)
    options = {"launch_pdl": True} if dependent else {}
    _skinny_kernel[(blocks * tile.parts,)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        out,
        partial,
        counts,
        tokens,
        n,
        k,
        eps,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        TOKENS=padded,
        ROWS=tile.rows,
        BLOCK_K=tile.columns,
        PARTS=tile.parts,
        EVEN_K=k % tile.columns == 0,
        GATED=gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        NORMED=norm_weight is not None,
        DEPENDENT=dependent,
        AHEAD=tile.ahead,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
        **options,
    )
    return out
