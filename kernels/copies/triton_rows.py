"""Copies of rows by index lists on the GPU, one launch each, by 16-byte accesses where the addresses allow.

For units and pages of the arena: snapshots, swaps and evacuation. Knows nothing of what the bytes are.
"""

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 1024
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit(do_not_specialize_on_alignment=["source_rows_ptr", "target_rows_ptr"])
def _copy_kernel(
    source_ptr,
    target_ptr,
    source_rows_ptr,
    target_rows_ptr,
    source_step,
    target_step,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FROM_LIST: tl.constexpr,
    TO_LIST: tl.constexpr,
):
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(source_rows_ptr + row) if FROM_LIST else row
    target = tl.load(target_rows_ptr + row) if TO_LIST else row
    words = tl.load(source_ptr + source * source_step + at, at < SIZE)
    tl.store(target_ptr + target * target_step + at, words, at < SIZE)


def copy_rows(windows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """windows[target] = windows[source]: no row of `target` may overlap one of `source` or another target.

    windows: uint8 [N, row_bytes], rows of any step, so that they may overlap. source, target: int64 [n].
    Capturable in a CUDA graph.
    """
    _launch(windows, windows, source, target)


def gather_rows(windows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The rows `source` (int64 [n]) of windows (as in `copy_rows`), dense: [n, row_bytes]."""
    rows = torch.empty(source.shape[0], windows.shape[1], dtype=torch.uint8, device=windows.device)
    _launch(windows, rows, source, None)
    return rows


def scatter_rows(windows: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows uint8 [n, row_bytes] over windows[target]; the rows named do not overlap each other."""
    _launch(rows, windows, None, target)


def _launch(
    origin: torch.Tensor,
    destination: torch.Tensor,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
) -> None:
    """Copy rows `source` of `origin` to rows `target` of `destination`; None: all, in order."""
    listed = source if source is not None else target
    assert listed is not None and origin.shape[1] == destination.shape[1]
    assert origin.dtype == destination.dtype == torch.uint8 and origin.stride(1) == destination.stride(1) == 1
    # a list or rows that are shorter would be read beyond their ends
    assert listed.shape == (origin.shape[:1] if source is None else source.shape)
    assert listed.shape == (destination.shape[:1] if target is None else target.shape)
    word = next(w for w in WORDS if _fits(origin, w.itemsize) and _fits(destination, w.itemsize))
    origin, destination = origin.view(word), destination.view(word)
    size = origin.shape[1]
    block = min(BLOCK_WORDS, triton.next_power_of_2(size))
    if listed.shape[0]:
        _copy_kernel[(listed.shape[0] * triton.cdiv(size, block),)](
            origin,
            destination,
            listed if source is None else source,
            listed if target is None else target,
            origin.stride(0),
            destination.stride(0),
            SIZE=size,
            BLOCK=block,
            FROM_LIST=source is not None,
            TO_LIST=target is not None,
            num_warps=4,
        )


def _fits(rows: torch.Tensor, nbytes: int) -> bool:
    """Whether every row of uint8 `rows` is whole words of `nbytes` at their own alignment."""
    return all(n % nbytes == 0 for n in (rows.shape[1], rows.stride(0), rows.data_ptr()))
