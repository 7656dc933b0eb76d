"""Norms at the sizes of Qwen3.5-9B and 27B: prefill by bandwidth, decode by latency."""

from collections.abc import Callable

import torch
from case import Calls, Case, goal_at, rotated
from launch import empty_launches, latency_goal

from hybridserve.kernels.rms_norm import cpu, triton_norm
from hybridserve.kernels.rms_norm.reference import rms_norm_gated_reference, rms_norm_reference
from hybridserve.kernels.testing import Work, assert_as_good_as_plain, poisoned_memory

EPS = 1e-6


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def weight(dim: int) -> torch.Tensor:
    return torch.randn(dim, device="cuda")


def norm(tokens: int, dim: int, small: bool = False) -> Case:
    def gate() -> None:
        x, w = rows(tokens, dim), weight(dim)
        with poisoned_memory():
            out = triton_norm.rms_norm(x, w, EPS, zero_centered=False)
        truth = rms_norm_reference(x.double(), w.double(), EPS, zero_centered=False)
        assert_as_good_as_plain(out, cpu.rms_norm(x, w, EPS, zero_centered=False), truth)

    def build(function: Callable[..., object]) -> Calls:
        def one() -> Callable[[], object]:
            x, w = rows(tokens, dim), weight(dim)
            return lambda: function(x, w, EPS, zero_centered=False)

        return [one()] if small else rotated(one, work)

    work = Work(nbytes=4 * tokens * dim + 4 * dim)
    return Case(
        operator="rms_norm",
        shape=f"{tokens} x {dim} bf16",
        work=work,
        calls=lambda: build(triton_norm.rms_norm),
        gate=gate,
        goal_us=latency_goal(work) if small else goal_at(work, 0.8),
        plain=lambda: build(cpu.rms_norm),
        baseline=empty_launches if small else None,
        warm=small,
    )


def residual(tokens: int, dim: int, small: bool = False) -> Case:
    def gate() -> None:
        x, r, w = rows(tokens, dim), rows(tokens, dim), weight(dim)
        with poisoned_memory():
            out, total = triton_norm.rms_norm_residual(x, r, w, EPS, zero_centered=False)
        truth = rms_norm_reference(total.double(), w.double(), EPS, zero_centered=False)
        assert torch.equal(total, x + r)
        assert_as_good_as_plain(out, cpu.rms_norm(total, w, EPS, zero_centered=False), truth)

    def plain(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + r
        return cpu.rms_norm(total, w, EPS, zero_centered=False), total

    def ours(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return triton_norm.rms_norm_residual(x, r, w, EPS, zero_centered=False)

    def build(function: Callable[..., object]) -> Calls:
        def one() -> Callable[[], object]:
            x, r, w = rows(tokens, dim), rows(tokens, dim), weight(dim)
            return lambda: function(x, r, w)

        return [one()] if small else rotated(one, work)

    work = Work(nbytes=8 * tokens * dim + 4 * dim)
    return Case(
        operator="rms_norm residual",
        shape=f"{tokens} x {dim} bf16",
        work=work,
        calls=lambda: build(ours),
        gate=gate,
        goal_us=latency_goal(work) if small else goal_at(work, 0.8),
        plain=lambda: build(plain),
        baseline=empty_launches if small else None,
        warm=small,
    )


def gated(tokens: int, heads: int, dim: int, row: int) -> Case:
    """The gate is a slice of a projection with `row` outputs a token."""

    def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = rows(tokens, row)[:, : heads * dim].unflatten(1, (heads, dim))
        return rows(tokens, heads, dim), z, weight(dim)

    def gate() -> None:
        x, z, w = inputs()
        with poisoned_memory():
            out = triton_norm.rms_norm_gated(x, z, w, EPS)
        truth = rms_norm_gated_reference(x.double(), z.double(), w.double(), EPS)
        assert_as_good_as_plain(out, cpu.rms_norm_gated(x, z, w, EPS), truth)

    def build(function: Callable[..., object]) -> Calls:
        def one() -> Callable[[], object]:
            x, z, w = inputs()
            return lambda: function(x, z, w, EPS)

        return rotated(one, work)

    work = Work(nbytes=6 * tokens * heads * dim + 4 * dim)
    return Case(
        operator="rms_norm gated",
        shape=f"{tokens} x {heads} x {dim} bf16",
        work=work,
        calls=lambda: build(triton_norm.rms_norm_gated),
        gate=gate,
        goal_us=goal_at(work, 0.8),
        plain=lambda: build(cpu.rms_norm_gated),
    )


def cases() -> list[Case]:
    return [
        norm(8192, 4096),
        norm(8192, 5120),
        norm(1, 4096, small=True),
        norm(32, 4096, small=True),
        norm(256, 4096, small=True),
        residual(8192, 4096),
        residual(8192, 5120),
        residual(256, 4096, small=True),
        gated(8192, 32, 128, 12352),
    ]


def warmups() -> list[Callable[[], object]]:
    dims = 4096, 128
    x, w = rows(1, dims[0]), weight(dims[0])
    z, head_weight = rows(1, 12352)[:, 8192:12288].unflatten(1, (32, 128)), weight(dims[1])
    return [
        lambda: triton_norm.rms_norm(x, w, EPS, zero_centered=False),
        lambda: triton_norm.rms_norm_residual(x, x, w, EPS, zero_centered=False),
        lambda: triton_norm.rms_norm_gated(x.view(1, 32, 128), z, head_weight, EPS),
    ]
