"""Copies of rows of bytes by index lists: units and pages of the arena."""

from hybridserve.kernels.copies.dispatch import copy_rows, gather_rows, scatter_rows

__all__ = ["copy_rows", "gather_rows", "scatter_rows"]
