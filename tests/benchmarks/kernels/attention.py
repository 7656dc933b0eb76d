"""Attention at Qwen3.5-9B's shapes (16 query and 4 KV heads of 256, bf16), pages in random order.

Prefill counts 4 * L * (C + L / 2) * H * D operations; decode counts the bytes of K and V.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from case import Calls, Case, goal_at, rotated

from hybridserve.kernels.attention import choice, triton_decode, triton_prefill, triton_write
from hybridserve.kernels.attention import cpu as plain_torch
from hybridserve.kernels.attention.reference import attention_reference
from hybridserve.kernels.testing import Work, assert_as_good_as_plain

HEADS, KV_HEADS, PAGE = 16, 4, 16
PREFILL_GOAL_TFLOPS = 420
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def make_pages(lens: tuple[int, ...], dim: int) -> Tables:
    """keys, values, block_tables of sequences of these lengths; K of a page right before its V."""
    counts = [-(-n // PAGE) for n in lens]
    slab = PAGE * KV_HEADS * dim
    flat = random((2 * sum(counts) + 1) * slab)
    entries = (torch.randperm(sum(counts)) * 2).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(entries), batch_first=True).cuda()
    shape = (2 * sum(counts), PAGE, KV_HEADS, dim)
    return flat[:-slab].view(shape), flat[slab:].view(shape), tables


def gather(tables: Tables, s: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values, block_tables = tables
    pages = block_tables[s, : -(-length // PAGE)]
    return keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length]


def prefill_call(attend: Callable[..., torch.Tensor], new: int, context: int, dim: int) -> Calls:
    tables = make_pages((new + context,), dim)
    k, v = (x[context:] for x in gather(tables, 0, new + context))
    q = random(new, HEADS, dim)
    return [partial(attend, q, k, v, *tables, (new,), (context,), scale=dim**-0.5)] * 2


def prefill_gate(attend: Callable[..., torch.Tensor], dim: int) -> None:
    new, context = 4096, 100
    tables = make_pages((new + context,), dim)
    k, v = gather(tables, 0, new + context)
    q, scale = random(new, HEADS, dim), dim**-0.5
    out = attend(q, k[context:], v[context:], *tables, (new,), (context,), scale=scale)
    for rows in (slice(0, 70), slice(new - 70, new)):
        seen = context + rows.stop
        exact, plain = (
            attention_reference(q[rows].to(t), k[:seen].to(t), v[:seen].to(t), scale=scale)
            for t in (torch.float64, torch.bfloat16)
        )
        assert_as_good_as_plain(out[rows], plain, exact)


def flash_call(new: int, dim: int) -> Calls:
    """PyTorch's own choice for dense causal attention without context."""
    q, k, v = (random(1, heads, new, dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)] * 2


def prefill_cases() -> list[Case]:
    cases = []
    for dim, new, context in (
        (256, 1024, 0),
        (256, 8192, 0),
        (256, 32768, 0),
        (256, 8192, 32768),
        (128, 8192, 0),
        (128, 32768, 0),
    ):
        flops = 4 * new * (context + new // 2) * HEADS * dim
        work = Work(flops=flops)
        goal = flops / PREFILL_GOAL_TFLOPS / 1e6 if dim == 256 and new >= 8192 else None
        attends = {"triton": triton_prefill.attention_prefill}
        if choice.takes_fused(dim, torch.bfloat16, new, context, None):
            attends["cudnn"] = choice.attention_prefill
        cases += [
            Case(
                operator=f"attention_prefill {name}",
                shape=f"{new} after {context}, {HEADS}/{KV_HEADS} x {dim} bf16",
                work=work,
                calls=partial(prefill_call, attend, new, context, dim),
                gate=partial(prefill_gate, attend, dim),
                goal_us=goal if name == "triton" else None,
                plain=None if context else partial(flash_call, new, dim),
            )
            for name, attend in attends.items()
        ]
    return cases


def decode_call(lens: tuple[int, ...], dim: int) -> Callable[[], torch.Tensor]:
    tables, q = make_pages(lens, dim), random(len(lens), HEADS, dim)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    return partial(triton_decode.attention_decode, q, *tables, seq_lens, scale=dim**-0.5)


def plain_decode_call(lens: tuple[int, ...], dim: int) -> Callable[[], torch.Tensor]:
    tables, q = make_pages(lens, dim), random(len(lens), HEADS, dim)
    return partial(plain_torch.attention_decode, q, *tables, lens, scale=dim**-0.5)


def decode_gate(lens: tuple[int, ...], dim: int) -> None:
    lens = (*lens[:3], 77, 1)
    tables, q = make_pages(lens, dim), random(len(lens), HEADS, dim)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    out = triton_decode.attention_decode(q, *tables, seq_lens, scale=dim**-0.5)
    for s, length in enumerate(lens):
        k, v = gather(tables, s, length)
        exact, plain = (
            attention_reference(q[s : s + 1].to(t), k.to(t), v.to(t), scale=dim**-0.5)
            for t in (torch.float64, torch.bfloat16)
        )
        assert_as_good_as_plain(out[s : s + 1], plain, exact)


def decode_cases() -> list[Case]:
    dim, cases = 256, []
    ragged = tuple(torch.randint(2048, 8193, (32,), generator=torch.Generator().manual_seed(1)).tolist())
    for name, lens, share in (
        ("1 x 2048", (2048,), None),
        ("1 x 32768", (32768,), None),
        ("8 x 8192", (8192,) * 8, None),
        ("32 x 4096", (4096,) * 32, 0.85),
        ("32 x 2048-8192", ragged, 0.85),
        ("256 x 1024", (1024,) * 256, None),
    ):
        work = Work(nbytes=sum(lens) * KV_HEADS * dim * 4)
        cases.append(
            Case(
                operator="attention_decode",
                shape=f"{name}, {HEADS}/{KV_HEADS} x {dim} bf16",
                work=work,
                calls=partial(rotated, partial(decode_call, lens, dim), work),
                gate=partial(decode_gate, lens, dim),
                goal_us=goal_at(work, share) if share else None,
                plain=partial(rotated, partial(plain_decode_call, lens, dim), work),
            )
        )
    return cases


def write_call(write: Callable[..., None], tokens: int, dim: int) -> Callable[[], None]:
    keys, values, tables = make_pages((tokens,), dim)
    # as cut out of the q|gate|k|v projection
    k, v = random(tokens, 10 * KV_HEADS * dim).split(5 * KV_HEADS * dim, 1)
    k, v = (x[:, : KV_HEADS * dim].view(tokens, KV_HEADS, dim) for x in (k, v))
    at = torch.arange(tokens, device="cuda")
    slots = tables[0, at // PAGE] * PAGE + at % PAGE
    return partial(write, k, v, keys.flatten(0, 1), values.flatten(0, 1), slots)


def write_gate() -> None:
    call = write_call(triton_write.write_kv, 1000, 256)
    call()
    k, v, key_slots, value_slots, slots = call.args
    assert torch.equal(key_slots[slots], k) and torch.equal(value_slots[slots], v)


def cases() -> list[Case]:
    write = Work(nbytes=8192 * KV_HEADS * 256 * 8)
    return [
        *prefill_cases(),
        *decode_cases(),
        Case(
            operator="write_kv",
            shape=f"8192 x {KV_HEADS} x 256 bf16",
            work=write,
            calls=partial(rotated, partial(write_call, triton_write.write_kv, 8192, 256), write),
            gate=write_gate,
            plain=partial(rotated, partial(write_call, plain_torch.write_kv, 8192, 256), write),
        ),
    ]


def warmups() -> list[Callable[[], object]]:
    return [
        *prefill_call(triton_prefill.attention_prefill, 16, 16, 256)[:1],
        decode_call((16,), 256),
        write_call(triton_write.write_kv, 16, 256),
    ]
