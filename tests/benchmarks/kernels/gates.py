"""Gates at the sizes of Qwen3.5-9B: of the MLP, of the attention's output, of Gated DeltaNet."""

from collections.abc import Callable

import torch
from case import Calls, Case, goal_at, rotated
from launch import empty_launches, latency_goal

from hybridserve.kernels.activation import cpu, triton_gates
from hybridserve.kernels.activation.reference import sigmoid_and_mul_reference, silu_and_mul_reference
from hybridserve.kernels.linear_attention import triton_gdn_gates
from hybridserve.kernels.linear_attention.cpu import gdn_gates
from hybridserve.kernels.testing import Work, assert_as_good_as_plain, poisoned_memory

QKV_ROW = 16 * 256 * 2 + 2 * 4 * 256
IN_PROJ_ROW = 12352


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def silu(tokens: int, size: int, small: bool = False) -> Case:
    def gate() -> None:
        x = rows(tokens, 2 * size)
        with poisoned_memory():
            out = triton_gates.silu_and_mul(x)
        assert_as_good_as_plain(out, cpu.silu_and_mul(x), silu_and_mul_reference(x.double()))

    def build(function: Callable[..., object]) -> Calls:
        def one() -> Callable[[], object]:
            x = rows(tokens, 2 * size)
            return lambda: function(x)

        return [one()] if small else rotated(one, work)

    work = Work(nbytes=6 * tokens * size)
    return Case(
        operator="silu_and_mul",
        shape=f"{tokens} x 2 x {size} bf16",
        work=work,
        calls=lambda: build(triton_gates.silu_and_mul),
        gate=gate,
        goal_us=latency_goal(work) if small else goal_at(work, 0.8),
        plain=lambda: build(cpu.silu_and_mul),
        baseline=empty_launches if small else None,
        warm=small,
    )


def sigmoid(tokens: int, size: int) -> Case:
    """The gate is a slice of the q|gate|k|v projection."""

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        return rows(tokens, size), rows(tokens, QKV_ROW)[:, size : 2 * size]

    def gate() -> None:
        x, g = inputs()
        with poisoned_memory():
            out = triton_gates.sigmoid_and_mul(x, g)
        truth = sigmoid_and_mul_reference(x.double(), g.double())
        assert_as_good_as_plain(out, cpu.sigmoid_and_mul(x, g), truth)

    def build(function: Callable[..., object]) -> Calls:
        def one() -> Callable[[], object]:
            x, g = inputs()
            return lambda: function(x, g)

        return rotated(one, work)

    work = Work(nbytes=6 * tokens * size)
    return Case(
        operator="sigmoid_and_mul",
        shape=f"{tokens} x {size} bf16",
        work=work,
        calls=lambda: build(triton_gates.sigmoid_and_mul),
        gate=gate,
        goal_us=goal_at(work, 0.8),
        plain=lambda: build(cpu.sigmoid_and_mul),
    )


def delta_net(tokens: int, heads: int) -> Case:
    def inputs() -> tuple[torch.Tensor, ...]:
        a, b = rows(tokens, IN_PROJ_ROW)[:, -2 * heads :].split(heads, 1)
        return a, b, *torch.randn(2, heads, device="cuda")

    def gate() -> None:
        a, b, a_log, dt_bias = inputs()
        with poisoned_memory():
            g, beta = triton_gdn_gates.gdn_gates(a, b, a_log, dt_bias)
        plain = gdn_gates(a, b, a_log, dt_bias)
        z = a.double() + dt_bias.double()
        softplus = z.clamp(min=0) + (-z.abs()).exp().log1p()
        assert_as_good_as_plain(g, plain[0], -a_log.double().exp() * softplus)
        assert_as_good_as_plain(beta, plain[1], b.double().sigmoid())

    def build(function: Callable[..., object]) -> Calls:
        args = inputs()
        return [lambda: function(*args)]

    work = Work(nbytes=12 * tokens * heads)
    return Case(
        operator="gdn_gates",
        shape=f"{tokens} x {heads} bf16",
        work=work,
        calls=lambda: build(triton_gdn_gates.gdn_gates),
        gate=gate,
        goal_us=latency_goal(work),
        plain=lambda: build(gdn_gates),
        baseline=empty_launches,
        warm=True,
    )


def cases() -> list[Case]:
    return [
        silu(8192, 12288),
        silu(8192, 17408),
        silu(1, 12288, small=True),
        silu(32, 12288, small=True),
        sigmoid(8192, 4096),
        delta_net(8192, 32),
    ]


def warmups() -> list[Callable[[], object]]:
    x, qkv, ab = rows(1, 2 * 12288), rows(1, QKV_ROW), rows(1, IN_PROJ_ROW)
    out, a_log = rows(1, 4096), torch.randn(32, device="cuda")
    return [
        lambda: triton_gates.silu_and_mul(x),
        lambda: triton_gates.sigmoid_and_mul(out, qkv[:, 4096:8192]),
        lambda: triton_gdn_gates.gdn_gates(ab[:, -64:-32], ab[:, -32:], a_log, a_log),
    ]
