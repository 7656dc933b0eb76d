"""The causal convolution of one Gated DeltaNet layer of Qwen3.5-9B."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from case import Calls, Case, goal_at, rotated

from hybridserve.kernels.causal_conv1d import cpu, triton_decode, triton_prefill
from hybridserve.kernels.testing import Work, assert_as_good_as_plain, poisoned_memory

CHANNELS, KERNEL, IN_PROJ_ROW = 8192, 4, 12352
SPLIT = (2048, 2048, 4096)


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    weight: torch.Tensor
    ring: torch.Tensor
    indices: torch.Tensor
    has_initial_state: torch.Tensor
    query_lens: tuple[int, ...]

    @classmethod
    def random(cls, query_lens: tuple[int, ...]) -> "Inputs":
        tokens, count = sum(query_lens), len(query_lens)
        return cls(
            torch.randn(tokens, IN_PROJ_ROW, device="cuda", dtype=torch.bfloat16)[:, :CHANNELS],
            # dense columns, as a model derives them once
            torch.randn(KERNEL, CHANNELS, device="cuda", dtype=torch.bfloat16).T,
            torch.randn(count, KERNEL, CHANNELS, device="cuda", dtype=torch.bfloat16),
            torch.randperm(count, device="cuda"),
            torch.zeros(count, dtype=torch.bool, device="cuda"),
            query_lens,
        )

    def ours(self) -> torch.Tensor:
        return triton_prefill.causal_conv1d_prefill(*self._args())

    def split(self) -> tuple[torch.Tensor, ...]:
        return triton_prefill.causal_conv1d_prefill_split(*self._args(), SPLIT)

    def plain(self) -> torch.Tensor:
        """As if it were one sequence, without the ring."""
        y = F.conv1d(self.x.T[None], self.weight.unsqueeze(1), padding=KERNEL - 1, groups=CHANNELS)
        return F.silu(y[0, :, : self.x.shape[0]]).T.contiguous()

    def _args(self) -> tuple[object, ...]:
        zeros = (0,) * len(self.query_lens)
        return (
            self.x,
            self.weight,
            None,
            self.ring,
            self.indices,
            self.has_initial_state,
            self.query_lens,
            zeros,
        )


def prefill(query_lens: tuple[int, ...], split: bool = False) -> Case:
    def gate() -> None:
        inputs = Inputs.random((257, 64, 1, 700))
        with poisoned_memory():
            out = torch.cat(inputs.split(), 1) if split else inputs.ours()
        rings = inputs.ring.clone()
        starts = [0, 257, 321, 322, 1022]
        truth = []
        for start, end in zip(starts, starts[1:], strict=False):
            x = inputs.x[start:end].double().T[None]
            y = F.conv1d(x, inputs.weight.double().unsqueeze(1), padding=KERNEL - 1, groups=CHANNELS)
            truth.append(F.silu(y[0, :, : end - start]).T)
        plain = cpu.causal_conv1d_prefill(*inputs._args())
        assert_as_good_as_plain(out, plain, torch.cat(truth))
        assert torch.equal(rings, inputs.ring)

    def build(which: Callable[[Inputs], object]) -> Calls:
        def one() -> Callable[[], object]:
            inputs = Inputs.random(query_lens)
            return lambda: which(inputs)

        return rotated(one, work)

    tokens = sum(query_lens)
    work = Work(nbytes=2 * CHANNELS * (2 * tokens + KERNEL * (1 + len(query_lens))))
    return Case(
        operator="causal_conv1d prefill" + " split" * split,
        shape=f"{len(query_lens)} x {query_lens[0]} x {CHANNELS} bf16",
        work=work,
        calls=lambda: build(Inputs.split if split else Inputs.ours),
        gate=gate,
        goal_us=goal_at(work, 0.8),
        plain=lambda: build(Inputs.plain),
    )


def decode(batch: int) -> Case:
    def inputs() -> tuple[torch.Tensor, ...]:
        weight = torch.randn(CHANNELS, KERNEL, device="cuda")
        return (
            torch.randn(batch, IN_PROJ_ROW, device="cuda", dtype=torch.bfloat16)[:, :CHANNELS],
            cpu.make_phase_weight(weight),
            None,
            torch.randn(batch, KERNEL, CHANNELS, device="cuda", dtype=torch.bfloat16),
            torch.randperm(batch, device="cuda"),
            torch.randint(4, 10_000, (batch,), device="cuda"),
        )

    def gate() -> None:
        args = inputs()
        x, weight, _, ring, indices, positions = args
        before = ring.clone()
        with poisoned_memory():
            out = triton_decode.causal_conv1d_decode(*args)
        after = ring.clone()
        ring.copy_(before)
        plain = cpu.causal_conv1d_decode(*args)
        assert torch.equal(after, ring)
        taps = weight[positions % KERNEL].double()
        truth = F.silu((ring[indices].double() * taps).sum(1))
        assert_as_good_as_plain(out, plain, truth)

    def build(function: Callable[..., object]) -> Calls:
        def one() -> Callable[[], object]:
            args = inputs()
            return lambda: function(*args)

        return rotated(one, work)

    work = Work(nbytes=2 * CHANNELS * batch * (KERNEL + 2) + 4 * KERNEL * CHANNELS)
    return Case(
        operator="causal_conv1d decode",
        shape=f"{batch} x {CHANNELS} bf16",
        work=work,
        calls=lambda: build(triton_decode.causal_conv1d_decode),
        gate=gate,
        goal_us=goal_at(work, 0.6),
        plain=lambda: build(cpu.causal_conv1d_decode),
    )


def cases() -> list[Case]:
    return [
        prefill((8192,)),
        prefill((8192,), split=True),
        prefill((1024,) * 8),
        decode(256),
    ]


def warmups() -> list[Callable[[], object]]:
    return [lambda: Inputs.random((1,)).ours(), lambda: Inputs.random((1,)).split()]
