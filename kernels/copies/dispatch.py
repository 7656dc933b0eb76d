"""Copies of rows where they lie: Triton's kernels on a GPU, plain PyTorch elsewhere."""

import torch

from hybridserve.kernels.copies import cpu


def copy_rows(windows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """windows[target] = windows[source]: no row of `target` may overlap one of `source` or another target.

    windows: uint8 [N, row_bytes], rows of any step, so that they may overlap. source, target: int64 [n].
    """
    if windows.is_cuda:
        from hybridserve.kernels.copies import triton_rows

        triton_rows.copy_rows(windows, source, target)
    else:
        cpu.copy_rows(windows, source, target)


def gather_rows(windows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The rows `source` (int64 [n]) of windows (as in `copy_rows`), dense: [n, row_bytes]."""
    if windows.is_cuda:
        from hybridserve.kernels.copies import triton_rows

        return triton_rows.gather_rows(windows, source)
    return cpu.gather_rows(windows, source)


def scatter_rows(windows: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows uint8 [n, row_bytes] over windows[target]; the rows named do not overlap each other."""
    if windows.is_cuda:
        from hybridserve.kernels.copies import triton_rows

        triton_rows.scatter_rows(windows, target, rows)
    else:
        cpu.scatter_rows(windows, target, rows)
