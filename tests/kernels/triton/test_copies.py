"""Copies of rows by index on the GPU (or interpreted): exactly the bytes asked for."""

import pytest
import torch

from hybridserve.kernels.copies import cpu, triton_rows
from hybridserve.kernels.copies.reference import copy_rows_reference

# row bytes, step between rows: 16-byte words, 4-byte words, odd; dense, and windows that overlap
SHAPES = [(512, 512), (1000, 250), (96, 4), (7, 5), (33, 33)]


def windows_of(row_bytes, step, device, count=64):
    buffer = torch.randint(0, 256, (count * max(step, row_bytes),), dtype=torch.uint8, device=device)
    rows = (buffer.numel() - row_bytes) // step + 1
    return buffer, buffer.as_strided((rows, row_bytes), (step, 1))


def rows_apart(row_bytes, step, device, count=20):
    """Distinct rows of `windows_of` that do not overlap, in random order."""
    apart = -(-row_bytes // step)
    return (torch.randperm(count) * apart).to(device)


@pytest.mark.parametrize(("row_bytes", "step"), SHAPES)
@pytest.mark.parametrize("implementation", [cpu, triton_rows], ids=["cpu", "triton"])
def test_copy_rows(device, row_bytes, step, implementation):
    buffer, windows = windows_of(row_bytes, step, device)
    source, target = rows_apart(row_bytes, step, device).split([9, 11])
    expected = buffer.clone()
    copy_rows_reference(expected.as_strided(windows.shape, windows.stride()), source, target[:9])
    implementation.copy_rows(windows, source, target[:9])
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize(("row_bytes", "step"), SHAPES)
@pytest.mark.parametrize("implementation", [cpu, triton_rows], ids=["cpu", "triton"])
def test_rows_gathered_first_may_be_targets(device, row_bytes, step, implementation):
    buffer, windows = windows_of(row_bytes, step, device)
    source = rows_apart(row_bytes, step, device)
    target = source.roll(1)
    rows = implementation.gather_rows(windows, source)
    assert torch.equal(rows, windows[source])
    expected = buffer.clone()
    expected.as_strided(windows.shape, windows.stride())[target] = rows
    implementation.scatter_rows(windows, target, rows)
    assert torch.equal(buffer, expected)


def test_no_rows_are_no_launch(device):
    buffer, windows = windows_of(64, 16, device)
    before, none = buffer.clone(), torch.empty(0, dtype=torch.int64, device=device)
    triton_rows.copy_rows(windows, none, none)
    assert triton_rows.gather_rows(windows, none).shape == (0, 64)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("implementation", [cpu, triton_rows], ids=["cpu", "triton"])
def test_lists_of_unlike_lengths_are_refused(device, implementation):
    _, windows = windows_of(64, 64, device)
    one, three = torch.tensor([9], device=device), torch.tensor([0, 1, 2], device=device)
    for copy, args in (
        (implementation.copy_rows, (three, one)),
        (implementation.copy_rows, (one, three)),
        (implementation.scatter_rows, (three, windows[:1].clone())),
    ):
        with pytest.raises((AssertionError, IndexError)):
            copy(windows, *args)


def test_units_at_the_end_of_a_large_arena(gpu):
    unit = 51_904_512
    arena = torch.empty(12 * 2**30, dtype=torch.uint8, device=gpu)
    windows = arena.as_strided(((arena.numel() - unit) // 256 + 1, unit), (256, 1))
    source, target = torch.tensor([0], device=gpu), torch.tensor([windows.shape[0] - 1], device=gpu)
    arena[:unit].random_(0, 256)
    triton_rows.copy_rows(windows, source, target)
    assert torch.equal(windows[-1], arena[:unit])


def test_no_recompile_whatever_the_number_of_rows(gpu, count_variants):
    _, windows = windows_of(8192, 256, gpu)
    rows = rows_apart(8192, 256, gpu)
    triton_rows.copy_rows(windows, rows[:3], rows[3:6])
    before = count_variants(triton_rows._copy_kernel)
    for count in (1, 2, 7, 10):
        triton_rows.copy_rows(windows, rows[:count], rows[10 : 10 + count])
    assert count_variants(triton_rows._copy_kernel) == before
