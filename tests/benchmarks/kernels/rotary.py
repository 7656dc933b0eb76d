"""q/k norm, rotary embedding and page write of one full-attention layer of Qwen3.5-9B."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from case import Calls, Case, goal_at, rotated
from launch import empty_launches, latency_goal

from hybridserve.kernels.attention.cpu import write_kv
from hybridserve.kernels.rms_norm.cpu import rms_norm
from hybridserve.kernels.rotary import cpu, triton_qk
from hybridserve.kernels.testing import Work, assert_as_good_as_plain, poisoned_memory

Q_HEADS, KV_HEADS, DIM, ROTARY_DIM = 16, 4, 256, 64
SIZES = [n * DIM for n in (Q_HEADS, Q_HEADS, KV_HEADS, KV_HEADS)]
EPS, THETA = 1e-6, 1e7


@dataclass(frozen=True)
class Inputs:
    qkv: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def random(cls, tokens: int) -> "Inputs":
        keys, values = (torch.randn(tokens + 64, KV_HEADS, DIM, device="cuda").bfloat16() for _ in range(2))
        return cls(
            torch.randn(tokens, sum(SIZES), device="cuda").bfloat16(),
            *torch.randn(2, DIM, device="cuda"),
            triton_qk.rotary_cos_sin(torch.arange(tokens, device="cuda") + 100_000, ROTARY_DIM, THETA),
            keys,
            values,
            torch.randperm(tokens + 64, device="cuda")[:tokens],
        )

    def ours(self) -> torch.Tensor:
        return triton_qk.qk_norm_rope_write(
            self.qkv,
            self.q_weight,
            self.k_weight,
            EPS,
            self.rotary,
            self.keys,
            self.values,
            self.slots,
            gated=True,
        )

    def heads(self) -> list[torch.Tensor]:
        return [part.unflatten(1, (-1, DIM)) for part in self.qkv.split(SIZES, 1)]

    def plain(self) -> torch.Tensor:
        q, _, k, v = self.heads()
        q = cpu.apply_rotary(rms_norm(q, self.q_weight, EPS, zero_centered=False), *self.rotary)
        k = cpu.apply_rotary(rms_norm(k, self.k_weight, EPS, zero_centered=False), *self.rotary)
        write_kv(k, v, self.keys, self.values, self.slots)
        return q


def exact(x: torch.Tensor, weight: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x = x.double()
    x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    cos, sin = (part.double().unsqueeze(1) for part in rotary)
    half = ROTARY_DIM // 2
    first, second, rest = x.split([half, half, DIM - 2 * half], -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def qk(tokens: int, small: bool = False) -> Case:
    def gate() -> None:
        inputs = Inputs.random(min(tokens, 1000))
        with poisoned_memory():
            q = inputs.ours()
        keys, values = inputs.keys[inputs.slots], inputs.values[inputs.slots]
        parts = inputs.heads()
        assert_as_good_as_plain(q, inputs.plain(), exact(parts[0], inputs.q_weight, inputs.rotary))
        plain_keys = inputs.keys[inputs.slots]
        assert_as_good_as_plain(keys, plain_keys, exact(parts[2], inputs.k_weight, inputs.rotary))
        assert torch.equal(values, parts[3])

    def build(which: Callable[[Inputs], torch.Tensor]) -> Calls:
        def one() -> Callable[[], object]:
            inputs = Inputs.random(tokens)
            return lambda: which(inputs)

        return [one()] if small else rotated(one, work)

    moved = 2 * 2 * (SIZES[0] + 2 * SIZES[2])
    work = Work(nbytes=tokens * (moved + ROTARY_DIM * 4 + 8))
    return Case(
        operator="qk_norm_rope_write",
        shape=f"{tokens} tokens, {Q_HEADS} + {KV_HEADS} heads of {DIM} bf16",
        work=work,
        calls=lambda: build(Inputs.ours),
        gate=gate,
        goal_us=latency_goal(work) if small else goal_at(work, 0.8),
        plain=lambda: build(Inputs.plain),
        baseline=empty_launches if small else None,
        warm=small,
    )


def angles(tokens: int) -> Case:
    positions = 100_000

    def gate() -> None:
        at = torch.arange(tokens, device="cuda") + positions
        out = torch.cat(triton_qk.rotary_cos_sin(at, ROTARY_DIM, THETA), 1)
        plain = torch.cat(cpu.rotary_cos_sin(at, ROTARY_DIM, THETA), 1)
        exponent = torch.arange(0, ROTARY_DIM, 2, dtype=torch.float32) / ROTARY_DIM
        angle = (at.float()[:, None] * (1.0 / THETA**exponent).cuda()).double()
        assert_as_good_as_plain(out, plain, torch.cat((angle.cos(), angle.sin()), 1))

    def build(function: Callable[..., object]) -> Calls:
        at = torch.arange(tokens, device="cuda") + positions
        return [lambda: function(at, ROTARY_DIM, THETA)]

    work = Work(nbytes=tokens * (8 + 4 * ROTARY_DIM))
    return Case(
        operator="rotary_cos_sin",
        shape=f"{tokens} tokens, {ROTARY_DIM} dims",
        work=work,
        calls=lambda: build(triton_qk.rotary_cos_sin),
        gate=gate,
        goal_us=latency_goal(work),
        plain=lambda: build(cpu.rotary_cos_sin),
        baseline=empty_launches,
        warm=True,
    )


def cases() -> list[Case]:
    return [
        qk(8192),
        qk(1, small=True),
        qk(32, small=True),
        qk(256, small=True),
        angles(256),
        angles(8192),
    ]


def warmups() -> list[Callable[[], object]]:
    positions = torch.arange(1, device="cuda")
    return [
        lambda: triton_qk.rotary_cos_sin(positions, ROTARY_DIM, THETA),
        lambda: Inputs.random(1).ours(),
    ]
