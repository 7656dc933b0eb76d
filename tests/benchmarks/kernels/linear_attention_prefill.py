"""Prefill of Gated DeltaNet with Qwen3.5-9B's heads: 16 key and 32 value heads of 128, bf16, fp32 states."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from case import Builder, Calls, Case

from hybridserve.kernels.linear_attention import linear_attention_prefill as plain_prefill
from hybridserve.kernels.linear_attention.reference import linear_attention_reference
from hybridserve.kernels.linear_attention.triton_prefill import linear_attention_prefill
from hybridserve.kernels.testing import Work, assert_as_good_as_plain, relative_error, rotations

K_HEADS, V_HEADS, DIM, CHUNK = 16, 32, 128, 64
GOALS_US = {(8192,): 300, (32768,): 1000, (1024,) * 8: 240}


def _inputs(lens: tuple[int, ...]) -> tuple:
    """Arguments of a prefill of sequences that go on from a state; gates as of a trained model's range."""
    tokens, device = sum(lens), "cuda"
    q, k = torch.randn(2, tokens, K_HEADS, DIM, device=device, dtype=torch.bfloat16).unbind(0)
    v = torch.randn(tokens, V_HEADS, DIM, device=device, dtype=torch.bfloat16)
    g = -torch.rand(tokens, V_HEADS, device=device).mul_(3).exp_().mul_(0.05)
    beta = torch.rand(tokens, V_HEADS, device=device)
    state = torch.randn(len(lens), V_HEADS, DIM, DIM, device=device)
    indices = torch.arange(len(lens), device=device)
    return q, k, v, g, beta, state, indices, indices >= 0, lens


def _work(lens: tuple[int, ...]) -> Work:
    """Bytes of inputs, outputs and states; operations of the chunkwise form, triangles counted as squares."""
    tokens = sum(lens)
    rows = tokens * 2 * DIM * (2 * K_HEADS + 2 * V_HEADS) + tokens * V_HEADS * 8
    states = len(lens) * V_HEADS * DIM * DIM * 4 * 2
    per_value_head = 6 * DIM * DIM + 4 * CHUNK * DIM
    per_key_head = 4 * CHUNK * DIM
    return Work(rows + states, tokens * (V_HEADS * per_value_head + K_HEADS * per_key_head))


def _gate() -> None:
    lens = (200, 64, 0, 600)
    *inputs, state, indices, known, _ = _inputs(lens)
    states = [state, state.clone(), state.double()]
    out = linear_attention_prefill(*inputs, states[0], indices, known, lens)
    plain = plain_prefill(*inputs, states[1], indices, known, lens)
    parts = zip(*(x.double().split(lens) for x in inputs), strict=True)
    truth = [linear_attention_reference(*part, states[2][s]) for s, part in enumerate(parts)]
    # plain PyTorch computes in fp32 and rounds its outputs to bf16; we round operands of products as well
    assert_as_good_as_plain(out, plain, torch.cat([o for o, _ in truth]), factor=3)
    assert relative_error(states[0], torch.stack([s for _, s in truth])) < torch.finfo(torch.bfloat16).eps


def _calls(lens: tuple[int, ...], prefill: Callable) -> Builder:
    def build() -> Calls:
        sets = [_inputs(lens) for _ in range(rotations(_work(lens).nbytes))]
        return [lambda args=args: prefill(*args) for args in sets]

    return build


def _fla(lens: tuple[int, ...]) -> Builder | None:
    """flash-linear-attention's operator on the same work, where it is installed; equal lengths as a batch."""
    if find_spec("fla") is None:
        return None

    def build() -> Calls:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        calls = []
        for _ in range(rotations(_work(lens).nbytes)):
            q, k, v, g, beta, state, *_ = _inputs(lens)
            batch = [x.unflatten(0, (len(lens), lens[0])) for x in (q, k, v, g, beta)]

            def call(batch: list[torch.Tensor] = batch, state: torch.Tensor = state) -> object:
                options = {
                    "initial_state": state,
                    "output_final_state": True,
                    "use_qk_l2norm_in_kernel": True,
                }
                return chunk_gated_delta_rule(*batch, **options)

            calls.append(call)
        return calls

    return build


def cases() -> list[Case]:
    return [
        Case(
            operator="gated delta prefill",
            shape=f"{len(lens)} x {lens[0]}, 16/32 heads of 128 bf16",
            work=_work(lens),
            calls=_calls(lens, linear_attention_prefill),
            gate=_gate,
            goal_us=goal,
            plain=_calls(lens, plain_prefill),
            plain_in_graph=False,
            baseline=_fla(lens),
        )
        for lens, goal in GOALS_US.items()
    ]


def warmups() -> list[Callable[[], object]]:
    """One for each number of programs a processor and parts of a sequence."""
    return [
        lambda lens=lens: linear_attention_prefill(*_inputs(lens)) for lens in [(64,), (64,) * 2, (64,) * 3]
    ]
