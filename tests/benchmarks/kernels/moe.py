"""Mixture of experts at the sizes of Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B: all launches behind the router's
product, which are the routing and the experts with the shared one and the residual.

The floor counts the weights of the experts that the tokens touch, once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from case import Calls, Case, goal_at

from hybridserve.kernels.moe import cpu, triton_experts, triton_route
from hybridserve.kernels.testing import Work, assert_as_good_as_plain, poisoned_memory

HIDDEN, SIZE = 2048, 512
EXPERT_BYTES = 3 * HIDDEN * SIZE * 2
DEVICE = "cuda"


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int

    def expected_experts(self, tokens: int) -> float:
        """How many experts random tokens touch, the shared one among them."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens) + 1

    def work(self, tokens: int) -> Work:
        flops = 6 * HIDDEN * SIZE * (self.top_k + 1) * tokens
        return Work(round(self.expected_experts(tokens) * EXPERT_BYTES), flops)


NEXT, SMALL = Shape(512, 10), Shape(256, 8)


def make_weights(experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 and w2 of all experts, drawn in pieces: at once they would take 13 GB."""
    w13 = torch.empty(experts, 2 * SIZE, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    w2 = torch.empty(experts, HIDDEN, SIZE, device=DEVICE, dtype=torch.bfloat16)
    for weights in (w13, w2):
        for part in weights.split(64):
            part.copy_(torch.randn(part.shape, device=DEVICE) / part.shape[2] ** 0.5)
    return w13, w2


def make_tokens(tokens: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, router logits, residual."""
    sizes = (HIDDEN, -(-(shape.experts + 1) // 16) * 16, HIDDEN)
    x, logits, residual = (torch.randn(tokens, n, device=DEVICE).bfloat16() for n in sizes)
    return x, logits, residual


def run(route: Callable, experts: Callable, shape: Shape, weights: tuple, tokens: tuple) -> torch.Tensor:
    x, logits, residual = tokens
    chosen = route(logits, shape.experts, shape.top_k, normalize=True)
    return experts(x, *weights, *chosen, residual)


def moe(tokens: int, shape: Shape, goal_us: float | None = None) -> Case:
    def gate() -> None:
        """On fewer experts: in fp64 the weights of all would take 13 GB."""
        few = Shape(48, shape.top_k)
        weights, inputs = make_weights(49), make_tokens(min(tokens, 300), few)
        with poisoned_memory():
            out = run(triton_route.moe_route, triton_experts.moe_experts, few, weights, inputs)
        plain = run(cpu.moe_route, cpu.moe_experts, few, weights, inputs)
        wide = [w.double() for w in weights], [a.double() for a in inputs]
        truth = run(cpu.moe_route, cpu.moe_experts, few, *wide)
        assert_as_good_as_plain(out, plain, truth)

    def build(route: Callable, experts: Callable, sets: int) -> Calls:
        weights = make_weights(shape.experts + 1)
        inputs = [make_tokens(tokens, shape) for _ in range(sets)]
        return [lambda own=own: run(route, experts, shape, weights, own) for own in inputs]

    return Case(
        operator="moe",
        shape=f"{tokens} x {HIDDEN}, {shape.experts} experts of {SIZE}, top {shape.top_k} bf16",
        work=shape.work(tokens),
        # other tokens choose other experts, so one set of weights is cold enough
        calls=lambda: build(triton_route.moe_route, triton_experts.moe_experts, 8 if tokens <= 8 else 2),
        gate=gate,
        goal_us=goal_us,
        plain=(lambda: build(cpu.moe_route, cpu.moe_experts, 2)) if tokens in (1, 256) else None,
        plain_in_graph=False,
    )


def cases() -> list[Case]:
    found = [moe(1, NEXT, 25.0)]
    found += [moe(tokens, NEXT, goal_at(NEXT.work(tokens), 0.75)) for tokens in (32, 256)]
    found += [moe(tokens, NEXT) for tokens in (8, 64, 2048, 8192)]
    return found + [moe(tokens, SMALL) for tokens in (1, 8, 32, 256, 8192)]
