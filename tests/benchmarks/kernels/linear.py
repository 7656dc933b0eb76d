"""Products with a weight at the sizes of Qwen3.5-9B and 27B, and the products of a layer as chains.

A chain runs over the weights of four layers, so each is cold, and counts as one layer's time; its goal is its
bytes at 90 % of 4.3 TB/s. A product alone also pays for its start, which a chain overlaps.
"""

from collections.abc import Callable
from functools import partial

import torch
from case import Calls, Case, goal_at, rotated

from hybridserve.kernels.activation import silu_and_mul
from hybridserve.kernels.linear import cpu, linear, linear_silu_and_mul
from hybridserve.kernels.linear.reference import linear_reference, linear_silu_and_mul_reference
from hybridserve.kernels.rms_norm import rms_norm
from hybridserve.kernels.rms_norm.reference import rms_norm_reference
from hybridserve.kernels.testing import Work, assert_as_good_as_plain, poisoned_memory

HIDDEN, INNER, IN_PROJ, VOCABULARY = 4096, 12288, 12352, 248320
EPS = 1e-6
SHAPES = {
    "9B in_proj": (IN_PROJ, HIDDEN),
    "9B qkv": (10240, HIDDEN),
    "9B out_proj": (HIDDEN, HIDDEN),
    "9B down": (HIDDEN, INNER),
    "27B down": (5120, 17408),
}
WITH_RESIDUAL = ("9B out_proj", "9B down", "27B down")
TOKENS = (1, 8, 32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def scaled(rows: int, columns: int) -> torch.Tensor:
    return random(rows, columns) * columns**-0.5


def product(name: str, tokens: int) -> Case:
    rows, columns = SHAPES[name]

    def inputs(weight_rows: int = rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        residual = random(tokens, weight_rows) if name in WITH_RESIDUAL else None
        return random(tokens, columns), scaled(weight_rows, columns), residual

    def gate() -> None:
        x, weight, residual = inputs()
        with poisoned_memory():
            out = linear(x, weight, residual=residual)
        truth = x.double() @ weight.double().t()
        truth = truth if residual is None else truth + residual
        assert_as_good_as_plain(out, cpu.linear(x, weight, None, residual), truth)

    def build(function: Callable[..., torch.Tensor]) -> Calls:
        def one() -> Callable[[], object]:
            x, weight, residual = inputs()
            return lambda: function(x, weight, None, residual)

        return rotated(one, work)

    added = 2 if name in WITH_RESIDUAL else 1
    work = Work(
        nbytes=2 * (rows * columns + tokens * (columns + added * rows)), flops=2 * tokens * rows * columns
    )
    return Case(
        operator="linear",
        shape=f"{tokens} x {columns} -> {rows}, {name} bf16",
        work=work,
        calls=lambda: build(linear),
        gate=gate,
        plain=lambda: build(cpu.linear),
    )


def head(tokens: int) -> Case:
    def gate() -> None:
        x, weight = random(tokens, HIDDEN), scaled(10007, HIDDEN)
        with poisoned_memory():
            out = linear(x, weight, out_dtype=torch.float32)
        truth, plain = x.double() @ weight.double().t(), cpu.linear(x, weight)
        assert out.dtype == torch.float32
        assert_as_good_as_plain(out.to(plain.dtype), plain, truth)

    def build(function: Callable[..., torch.Tensor]) -> Calls:
        def one() -> Callable[[], object]:
            x, weight = random(tokens, HIDDEN), scaled(VOCABULARY, HIDDEN)
            return lambda: function(x, weight)

        return rotated(one, work)

    nbytes = 2 * VOCABULARY * HIDDEN + tokens * (2 * HIDDEN + 4 * VOCABULARY)
    work = Work(nbytes=nbytes, flops=2 * tokens * VOCABULARY * HIDDEN)
    return Case(
        operator="linear to fp32",
        shape=f"{tokens} x {HIDDEN} -> {VOCABULARY}, 9B head bf16",
        work=work,
        calls=lambda: build(partial(linear, out_dtype=torch.float32)),
        gate=gate,
        plain=lambda: build(cpu.linear_fp32),
    )


Layer = dict[str, torch.Tensor]


def layer_weights() -> Layer:
    return {
        "norm": torch.rand(HIDDEN, device="cuda") + 0.5,
        "in_proj": scaled(IN_PROJ, HIDDEN),
        "out_proj": scaled(HIDDEN, HIDDEN),
        "gate_up": scaled(2 * INNER, HIDDEN),
        "down": scaled(HIDDEN, INNER),
    }


def ours(h: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The products and norms of a layer; a part of the projection stands for the mixer's output."""
    x = rms_norm(h, layer["norm"], EPS, zero_centered=False, dependent=True)
    x = linear(x, layer["in_proj"], dependent=True)[:, :HIDDEN]
    h = linear(x, layer["out_proj"], residual=h, dependent=True)
    x = rms_norm(h, layer["norm"], EPS, zero_centered=False, dependent=True)
    x = linear_silu_and_mul(x, layer["gate_up"], dependent=True)
    return linear(x, layer["down"], residual=h, dependent=True)


def exact(h: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The same in fp64, written out."""
    h, w = h.double(), {name: weight.double() for name, weight in layer.items()}
    x = linear_reference(rms_norm_reference(h, w["norm"], EPS, zero_centered=False), w["in_proj"])[:, :HIDDEN]
    h = linear_reference(x, w["out_proj"], None, h)
    x = linear_silu_and_mul_reference(
        rms_norm_reference(h, w["norm"], EPS, zero_centered=False), w["gate_up"]
    )
    return linear_reference(x, w["down"], None, h)


def plain(h: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The same with cuBLAS between our other kernels."""
    x = cpu.linear(rms_norm(h, layer["norm"], EPS, zero_centered=False), layer["in_proj"])[:, :HIDDEN]
    h = cpu.linear(x, layer["out_proj"], None, h)
    x = cpu.linear(rms_norm(h, layer["norm"], EPS, zero_centered=False), layer["gate_up"])
    return cpu.linear(silu_and_mul(x), layer["down"], None, h, consume_residual=True)


def chain(tokens: int) -> Case:
    work = Work(nbytes=2 * HIDDEN * (IN_PROJ + HIDDEN + 3 * INNER))

    def gate() -> None:
        h, layer = random(min(tokens, 3), HIDDEN), layer_weights()
        assert_as_good_as_plain(ours(h, layer), plain(h, layer), exact(h, layer))

    def build(function: Callable[[torch.Tensor, Layer], torch.Tensor]) -> Calls:
        # all kept, as a captured call goes on reading what the one before it left
        hidden = [random(tokens, HIDDEN)]

        def one() -> Callable[[], object]:
            layer = layer_weights()
            return lambda: hidden.append(function(hidden[-1], layer))

        return [one() for _ in range(4)]

    return Case(
        operator="linear chain",
        shape=f"{tokens} tokens, all products and norms of a 9B layer, bf16",
        work=work,
        calls=lambda: build(ours),
        gate=gate,
        goal_us=goal_at(work, 0.9),
        plain=lambda: build(plain),
    )


def cases() -> list[Case]:
    products = [product(name, tokens) for name in SHAPES for tokens in TOKENS]
    return products + [head(tokens) for tokens in TOKENS] + [chain(tokens) for tokens in (1, 2, 8, 16, 32)]


def warmups() -> list[Callable[[], object]]:
    variants = []
    for tokens in (1, 2, 17):
        x, wide = random(tokens, HIDDEN), random(tokens, INNER)
        square, down, gate_up = scaled(HIDDEN, HIDDEN), scaled(HIDDEN, INNER), scaled(4096, HIDDEN)
        many, small_head = scaled(IN_PROJ, HIDDEN), scaled(20480, HIDDEN)
        variants += [
            partial(linear, x, many, dependent=True),
            partial(linear, x, square, residual=x, dependent=True),
            partial(linear, wide, down, residual=x, dependent=True),
            partial(linear_silu_and_mul, x, gate_up, dependent=True),
            partial(linear, x, small_head, out_dtype=torch.float32, dependent=True),
        ]
    return variants
