"""Copies of rows by index in plain PyTorch, on whatever device the rows lie."""

import torch


def gather_rows(windows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The rows `source` (int64 [n]) of windows (as in `copy_rows`), dense: [n, row_bytes]."""
    return windows.index_select(0, source)


def scatter_rows(windows: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows uint8 [n, row_bytes] over windows[target]; the rows named do not overlap each other."""
    windows.index_copy_(0, target, rows)


def copy_rows(windows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """windows[target] = windows[source]: no row of `target` may overlap one of `source` or another target.

    windows: uint8 [N, row_bytes], rows of any step, so that they may overlap. source, target: int64 [n].
    """
    scatter_rows(windows, target, gather_rows(windows, source))
