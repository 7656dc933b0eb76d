"""Copies of units and pages of Qwen3.5-9B."""

from collections.abc import Callable

import torch
from case import Calls, Case, goal_at, rotated

from hybridserve.kernels.copies import cpu, triton_rows
from hybridserve.kernels.copies.reference import copy_rows_reference
from hybridserve.kernels.testing import Work

UNIT_BYTES, UNIT_STEP = 51_904_512, 256
PAGE_BYTES, PAGE_STEP = 524_288, 32_768


def copies(what: str, row_bytes: int, step: int, count: int) -> Case:
    def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        buffer = torch.empty(2 * count * row_bytes, dtype=torch.uint8, device="cuda").random_(0, 256)
        windows = buffer.as_strided(((buffer.numel() - row_bytes) // step + 1, row_bytes), (step, 1))
        rows = torch.randperm(2 * count, device="cuda") * (row_bytes // step)
        return windows, rows[:count], rows[count:]

    def gate() -> None:
        windows, source, target = inputs()
        flat = windows.as_strided((2 * count * row_bytes,), (1,))
        expected = flat.clone()
        copy_rows_reference(expected.as_strided(windows.shape, windows.stride()), source, target)
        triton_rows.copy_rows(windows, source, target)
        assert torch.equal(flat, expected)

    def build(function: Callable[..., object]) -> Calls:
        def one() -> Callable[[], object]:
            args = inputs()
            return lambda: function(*args)

        return rotated(one, work)

    work = Work(nbytes=2 * count * row_bytes)
    return Case(
        operator=f"copy_rows {what}",
        shape=f"{count} x {row_bytes} bytes",
        work=work,
        calls=lambda: build(triton_rows.copy_rows),
        gate=gate,
        goal_us=goal_at(work, 0.8),
        plain=lambda: build(cpu.copy_rows),
    )


def cases() -> list[Case]:
    return [
        copies("units", UNIT_BYTES, UNIT_STEP, 1),
        copies("units", UNIT_BYTES, UNIT_STEP, 4),
        copies("pages", PAGE_BYTES, PAGE_STEP, 99),
    ]


def warmups() -> list[Callable[[], object]]:
    def copy(row_bytes: int, step: int) -> None:
        buffer = torch.empty(2 * row_bytes, dtype=torch.uint8, device="cuda")
        rows = torch.tensor([0, row_bytes // step], device="cuda")
        windows = buffer.as_strided((row_bytes // step + 1, row_bytes), (step, 1))
        triton_rows.copy_rows(windows, rows[:1], rows[1:])

    return [lambda: copy(UNIT_BYTES, UNIT_STEP), lambda: copy(PAGE_BYTES, PAGE_STEP)]
