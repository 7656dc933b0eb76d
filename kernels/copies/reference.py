"""Copies of rows one after another: the truth for the fast paths when no source is also a target."""

import torch


def copy_rows_reference(windows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """windows[target[i]] = windows[source[i]] for each i. windows: uint8 [N, row_bytes]."""
    for src, dst in zip(source.tolist(), target.tolist(), strict=True):
        windows[dst] = windows[src].clone()
