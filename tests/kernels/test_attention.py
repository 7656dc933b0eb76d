"""Paged attention against the written-out form in fp64, with NaN everywhere a sequence has no token."""

from dataclasses import dataclass

import pytest
import torch

from hybridserve.kernels.attention import attention_decode, attention_prefill, write_kv
from hybridserve.kernels.attention.choice import takes_fused
from hybridserve.kernels.attention.reference import attention_reference

PAGE = 16
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 700)


@dataclass
class Paged:
    """Sequences whose tokens lie in shuffled pages of a poisoned buffer, K of a page right before its V."""

    keys: torch.Tensor
    values: torch.Tensor
    key_slots: torch.Tensor
    value_slots: torch.Tensor
    block_tables: torch.Tensor

    def slots(self, sequence: int, start: int, end: int) -> torch.Tensor:
        positions = torch.arange(start, end)
        return self.block_tables[sequence, positions // PAGE] * PAGE + positions % PAGE


def make_pages(lens, kv_heads: int, dim: int) -> Paged:
    slab = PAGE * kv_heads * dim
    counts = [-(-n // PAGE) for n in lens]
    buffer = torch.full((2 * sum(counts) + 4, slab), torch.nan)
    entries = (torch.randperm(sum(counts)) * 2 + 2).tolist()
    tables = torch.zeros(len(lens), max(*counts, 1) + 1, dtype=torch.int64)
    for s, count in enumerate(counts):
        tables[s, :count] = torch.tensor([entries.pop() for _ in range(count)], dtype=torch.int64)
    flat = buffer.view(-1)
    shape = (buffer.shape[0] - 1, PAGE, kv_heads, dim)
    keys, values = flat[:-slab].view(shape), flat[slab:].view(shape)
    return Paged(keys, values, keys.flatten(0, 1), values.flatten(0, 1), tables)


def check_prefill(
    query_lens, context_lens, assert_accurate, heads=4, kv_heads=2, dim=24, window=None
) -> None:
    lens = [n + c for n, c in zip(query_lens, context_lens, strict=True)]
    paged = make_pages(lens, kv_heads, dim)
    q = [torch.randn(n, heads, dim) for n in query_lens]
    k, v = ([torch.randn(n, kv_heads, dim) for n in lens] for _ in range(2))
    for s, n in enumerate(lens):
        write_kv(k[s], v[s], paged.key_slots, paged.value_slots, paged.slots(s, 0, n))
    new_k, new_v = (torch.cat([x[c:] for x, c in zip(xs, context_lens, strict=True)]) for xs in (k, v))
    room = torch.full((sum(query_lens), heads, dim), float("nan"))
    out = attention_prefill(
        torch.cat(q),
        new_k,
        new_v,
        paged.keys,
        paged.values,
        paged.block_tables,
        query_lens,
        context_lens,
        scale=0.3,
        window=window,
        out=room,
    )
    assert out is room
    exact, plain = (
        torch.cat(
            [
                attention_reference(a.to(t), b.to(t), c.to(t), scale=0.3, window=window)
                for a, b, c in zip(q, k, v, strict=True)
            ]
        )
        for t in (torch.float64, torch.float32)
    )
    assert_accurate(out, exact, plain)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_lengths(length, assert_accurate):
    check_prefill((length,), (0,), assert_accurate)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_prefill_ragged_with_context(heads, kv_heads, assert_accurate):
    query_lens, context_lens = (1, 0, 2, 30, 5, 64, 3), (0, 0, 17, 16, 300, 15, 1)
    check_prefill(query_lens, context_lens, assert_accurate, heads, kv_heads, 40)


def test_prefill_longer_than_a_query_block_with_context(assert_accurate):
    check_prefill((300,), (100,), assert_accurate, 2, 1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_decode_lengths(length, heads, kv_heads, assert_accurate):
    check_decode((length,), heads, kv_heads, assert_accurate)


def check_decode(lens, heads, kv_heads, assert_accurate, dim=24, window=None) -> None:
    paged = make_pages(lens, kv_heads, dim)
    q = torch.randn(len(lens), heads, dim)
    k, v = ([torch.randn(n, kv_heads, dim) for n in lens] for _ in range(2))
    for s, n in enumerate(lens):
        write_kv(k[s], v[s], paged.key_slots, paged.value_slots, paged.slots(s, 0, n))
    pages = (paged.keys, paged.values, paged.block_tables)
    out = attention_decode(q, *pages, tuple(lens), scale=0.3, window=window)
    on_device = attention_decode(q, *pages, torch.tensor(lens), scale=0.3, window=window)
    assert torch.equal(on_device, out)
    exact, plain = (
        torch.cat(
            [
                attention_reference(q[s : s + 1].to(t), k[s].to(t), v[s].to(t), scale=0.3, window=window)
                for s in range(len(lens))
            ]
        )
        for t in (torch.float64, torch.float32)
    )
    assert_accurate(out, exact, plain)


@pytest.mark.parametrize("window", [1, 16, 70, 1000])
def test_window(window, assert_accurate):
    check_prefill((1, 40, 300), (90, 33, 20), assert_accurate, window=window)
    check_decode((1, 16, 300, 90), 4, 2, assert_accurate, window=window)


@pytest.mark.parametrize(
    ("head_dim", "query_len", "context_len", "window", "fused"),
    [
        (256, 8192, 0, None, True),
        (256, 7936, 0, None, True),
        (256, 7000, 0, None, False),
        (256, 2048, 0, None, False),
        (256, 2048, 32768, None, False),
        (256, 8192, 4096, None, False),
        (64, 8192, 0, None, False),
        (256, 8192, 0, 512, False),
    ],
)
def test_what_cudnn_takes(head_dim, query_len, context_len, window, fused):
    assert takes_fused(head_dim, torch.bfloat16, query_len, context_len, window) is fused
    assert not takes_fused(head_dim, torch.float32, query_len, context_len, window)


def test_decode_ragged_batch(assert_accurate):
    check_decode((1, 16, 300, 17, 2, 15, 64, 65, 1, 33, 128, 127), 4, 2, assert_accurate)


def test_decode_equal_lengths(assert_accurate):
    check_decode((37,) * 16, 4, 2, assert_accurate)


@pytest.mark.parametrize("query_lens", [(), (0, 0)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_prefill_of_no_tokens(device, query_lens):
    """Nor is a device other than the CPU asked for anything."""
    q, k = (torch.empty(0, heads, 24, device=device) for heads in (4, 2))
    pages, tables = torch.empty(3, 16, 2, 24, device=device), torch.zeros(len(query_lens), 1, device=device)
    out = attention_prefill(q, k, k, pages, pages, tables.long(), query_lens, query_lens, scale=0.3)
    assert out.shape == q.shape and out.device == q.device


def test_decode_of_no_rows():
    paged = make_pages((5,), 2, 24)
    out = attention_decode(
        torch.empty(0, 4, 24), paged.keys, paged.values, paged.block_tables[:0], (), scale=0.3
    )
    assert out.shape == (0, 4, 24)


def test_decode_rows_are_bitwise_their_own_in_any_batch():
    lens = (1, 16, 300, 17, 40, 40, 64, 65, 100, 33, 128, 127)
    paged = make_pages(lens, 2, 24)
    for s, n in enumerate(lens):
        k, v = torch.randn(n, 2, 24), torch.randn(n, 2, 24)
        write_kv(k, v, paged.key_slots, paged.value_slots, paged.slots(s, 0, n))
    q, order = torch.randn(len(lens), 4, 24), torch.randperm(len(lens))

    def decode(rows: torch.Tensor) -> torch.Tensor:
        tables, chosen = paged.block_tables[rows], tuple(lens[r] for r in rows.tolist())
        return attention_decode(q[rows], paged.keys, paged.values, tables, chosen, scale=0.3)

    out = decode(torch.arange(len(lens)))
    assert torch.equal(decode(order), out[order])
    for b in range(len(lens)):
        assert torch.equal(decode(torch.tensor([b]))[0], out[b])


def test_decode_reads_nothing_of_padded_rows():
    lens = (70, 0, 33)
    paged = make_pages(lens, 2, 24)
    for s, n in enumerate(lens):
        k, v = torch.randn(n, 2, 24), torch.randn(n, 2, 24)
        write_kv(k, v, paged.key_slots, paged.value_slots, paged.slots(s, 0, n))
    q, pages = torch.randn(3, 4, 24), (paged.keys, paged.values)
    expected = attention_decode(q[[0, 2]], *pages, paged.block_tables[[0, 2]], (70, 33), scale=0.3)
    # a padded row's table names pages that do not exist
    table = torch.full_like(paged.block_tables, 1 << 29)
    table[[0, 2]] = paged.block_tables[[0, 2]]
    out = attention_decode(q, *pages, table, lens, scale=0.3)
    assert torch.equal(out[[0, 2]], expected) and not out[1].any()


def test_write_kv_touches_only_its_slots():
    paged = make_pages((40,), 2, 24)
    k, v = torch.randn(3, 2, 24), torch.randn(3, 2, 24)
    slots = paged.slots(0, 15, 18)
    write_kv(k, v, paged.key_slots, paged.value_slots, slots)
    assert torch.equal(paged.key_slots[slots], k)
    assert torch.equal(paged.value_slots[slots], v)
    written = 2 * k.numel()
    whole = torch.as_strided(paged.keys, (paged.keys.untyped_storage().size() // 4,), (1,), 0)
    assert int((~whole.isnan()).sum()) == written
