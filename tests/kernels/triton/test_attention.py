"""Paged attention in Triton: on the GPU in full, in Triton's interpreter on small shapes without one.

K and V lie in shuffled pages of one poisoned buffer, as in the arena: rows of a view overlap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from hybridserve.kernels.attention import choice, fused, triton_decode
from hybridserve.kernels.attention.reference import attention_reference
from hybridserve.kernels.attention.triton_decode import attention_decode
from hybridserve.kernels.attention.triton_merge import merge_
from hybridserve.kernels.attention.triton_prefill import attention_prefill
from hybridserve.kernels.attention.triton_write import write_kv
from hybridserve.kernels.compilation import recorded_launches
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory

PAGE = 16
GPU = torch.cuda.is_available()
# the interpreter multiplies the bits of bf16 operands as if they were integers
DTYPE = torch.bfloat16 if GPU else torch.float16
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if GPU else (torch.float16, torch.float32)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, *((1000, 4096) if GPU else (200,)))
HEADS = ((4, 4), (4, 2), (4, 1), (16, 4), (24, 4)) if GPU else ((2, 1),)
DIMS = (64, 128, 256) if GPU else (64,)

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if GPU else "cpu")


@dataclass
class Paged:
    """Sequences of given lengths: their dense keys and values, and the same in pages."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor
    block_tables: torch.Tensor


def make_pages(
    lens: Sequence[int],
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    magnitude: float = 1.0,
    ids: torch.dtype = torch.int64,
    lead: int = 0,
) -> Paged:
    """Pages of two slabs (K, then V) in random order, `lead` slabs from the start; NaN elsewhere."""
    slab = PAGE * kv_heads * dim
    counts = [-(-n // PAGE) for n in lens]
    slabs = lead + 2 * sum(counts) + 4
    flat = torch.empty(slabs * slab, dtype=dtype, device=device)
    flat[lead * slab :].fill_(torch.nan)
    entries = (torch.randperm(sum(counts)) * 2 + 2 + lead).tolist()
    tables = torch.zeros(len(lens), max(*counts, 1) + 1, dtype=ids)
    for s, count in enumerate(counts):
        tables[s, :count] = torch.tensor([entries.pop() for _ in range(count)], dtype=ids)
    tables = tables.to(device)
    shape = (slabs - 1, PAGE, kv_heads, dim)
    keys, values = flat[:-slab].view(shape), flat[slab:].view(shape)
    k, v = (
        [(torch.randn(n, kv_heads, dim, device=device) * magnitude).to(dtype) for n in lens] for _ in range(2)
    )
    for s, n in enumerate(lens):
        at = torch.arange(n, device=device)
        slots = tables[s, at // PAGE].long() * PAGE + at % PAGE
        write_kv(k[s], v[s], keys.flatten(0, 1), values.flatten(0, 1), slots)
    return Paged(k, v, keys, values, tables)


def truth_and_plain(
    q: Sequence[torch.Tensor], paged: Paged, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    exact, plain = (
        torch.cat(
            [
                attention_reference(a.to(t), b.to(t), c.to(t), scale=scale, window=window)
                for a, b, c in zip(q, paged.k, paged.v, strict=True)
            ]
        )
        for t in (torch.float64, q[0].dtype)
    )
    return exact, plain


def merged_prefill(
    q: torch.Tensor, paged: Paged, context: int, cut: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to tokens [cut, n), and by the merge kernel, to all."""
    n, tables = len(paged.k[0]), (paged.keys, paged.values)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    new = (paged.k[0][context:], paged.v[0][context:])
    out = attention_prefill(
        q, *new, *tables, paged.block_tables[:, cut // PAGE :], (n - context,), (context - cut,), scale=scale,
        lse=lse,
    ).float()  # fmt: skip
    k, v = (x[0][:cut].float().repeat_interleave(q.shape[1] // x[0].shape[1], 1) for x in (paged.k, paged.v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    part = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    merge_(out, lse, part, scores.logsumexp(-1).T)
    return out.to(q.dtype), lse


def test_a_context_in_two_parts_merges_to_the_whole(device: torch.device):
    paged, scale = make_pages((150,), 1, 64, DTYPE, device), 0.125
    q = torch.randn(30, 2, 64, device=device, dtype=DTYPE)
    out, lse = merged_prefill(q, paged, 120, 64, scale)
    exact, plain = truth_and_plain([q], paged, scale, None)
    assert_as_good_as_plain(out, plain, exact)
    k = paged.k[0][:, 0].double()
    scores = (q.double() @ k.T * scale).masked_fill(
        torch.arange(150, device=device) > torch.arange(120, 150, device=device)[:, None, None], -torch.inf
    )
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=0)


def prefill(q: Sequence[torch.Tensor], paged: Paged, context_lens: Sequence[int], **options) -> torch.Tensor:
    new_k, new_v = (
        torch.cat([x[c:] for x, c in zip(xs, context_lens, strict=True)]) for xs in (paged.k, paged.v)
    )
    query_lens = tuple(len(x) for x in q)
    tables = (paged.keys, paged.values, paged.block_tables)
    with poisoned_memory():
        return attention_prefill(
            torch.cat(list(q)), new_k, new_v, *tables, query_lens, tuple(context_lens), **options
        )


def test_cudnns_plans_wait_for_a_recording_s_end_and_can_be_built_beforehand(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    q, k = (torch.ones(5, heads, 64, device=device, dtype=DTYPE) for heads in (4, 2))
    with recorded_launches() as noted:
        out, lse = fused._cudnn(q, k, k, 0.1, causal=True)
    assert noted == [] and out.shape == q.shape and lse.shape == (5, 4) and lse.dtype == torch.float32
    asked = []
    monkeypatch.setattr(choice, "_has_fused", lambda device: True)
    monkeypatch.setattr(
        fused, "_cudnn", lambda q, k, v, scale, causal: asked.append((len(q), len(k), causal))
    )
    where = torch.bfloat16, torch.device("meta")
    choice.build_plans(4, 2, 128, *where, 8192, 10_000)
    assert asked == [(4096, 4096, True), (4096, 8192, False), (8192, 8192, True), (8192, 8192, False)]
    asked.clear()
    choice.build_plans(4, 2, 128, *where, 3000, 10_000)
    choice.build_plans(4, 2, 96, *where, 8192, 10_000)
    choice.build_plans(4, 2, 128, torch.bfloat16, torch.device("cpu"), 8192, 10_000)
    assert asked == []


@needs_gpu
def test_cudnn_builds_its_plans(device: torch.device):
    choice.build_plans(16, 4, 256, torch.bfloat16, device, 8192, 40_000)


def test_prefill_into_given_memory(device: torch.device):
    paged, context_lens = make_pages((40, 21), 1, 64, DTYPE, device), (20, 4)
    q = [torch.randn(n, 2, 64, device=device, dtype=DTYPE) for n in (20, 17)]
    out = prefill(q, paged, context_lens, scale=0.125)
    room = torch.full((50, 2, 64), float("nan"), device=device, dtype=DTYPE)
    assert prefill(q, paged, context_lens, scale=0.125, out=room[3:40]).data_ptr() == room[3].data_ptr()
    assert torch.equal(room[3:40], out) and room[:3].isnan().all() and room[40:].isnan().all()
    with pytest.raises(AssertionError):
        prefill(q, paged, context_lens, scale=0.125, out=room)


def check_prefill(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    device: torch.device,
    heads: tuple[int, int] = (2, 1),
    dim: int = 64,
    dtype: torch.dtype = DTYPE,
    window: int | None = None,
    magnitude: float = 1.0,
    **pages,
) -> None:
    lens = [n + c for n, c in zip(query_lens, context_lens, strict=True)]
    paged = make_pages(lens, heads[1], dim, dtype, device, magnitude, **pages)
    q = [(torch.randn(n, heads[0], dim, device=device) * magnitude).to(dtype) for n in query_lens]
    out = prefill(q, paged, context_lens, scale=dim**-0.5, window=window)
    exact, plain = truth_and_plain(q, paged, dim**-0.5, window)
    assert_as_good_as_plain(out, plain, exact)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_lengths(length: int, device: torch.device):
    check_prefill((length,), (0,), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_ragged_with_context(heads, dim, dtype, device):
    query_lens, context_lens = (1, 0, 2, 30, 5, 64, 3), (0, 0, 17, 16, 150, 15, 1)
    check_prefill(query_lens, context_lens, device, heads, dim, dtype)


@pytest.mark.parametrize("window", [1, 16, 70, 1000])
@pytest.mark.parametrize("dim", DIMS)
def test_prefill_window(window: int, dim: int, device: torch.device):
    check_prefill((1, 40, 100), (90, 33, 0), device, dim=dim, window=window)


def test_prefill_odd_head_dim_and_int32_tables(device: torch.device):
    check_prefill((20, 3), (0, 50), device, dim=24, ids=torch.int32)


@pytest.mark.parametrize("magnitude", [1e-3, 30.0])
def test_prefill_magnitudes(magnitude: float, device: torch.device):
    check_prefill((50, 20), (0, 30), device, magnitude=magnitude)


@needs_gpu
@pytest.mark.parametrize("dim", DIMS)
def test_prefill_many_blocks(dim: int, device: torch.device):
    check_prefill((1000, 333, 129), (0, 2000, 4095), device, (8, 2), dim)


def test_prefill_order_of_sequences_changes_no_bit(device: torch.device):
    context_lens, query_lens = (0, 17, 64), (33, 64, 5)
    paged = make_pages([a + b for a, b in zip(query_lens, context_lens, strict=True)], 1, 64, DTYPE, device)
    q = [torch.randn(n, 2, 64, device=device, dtype=DTYPE) for n in query_lens]
    out = prefill(q, paged, context_lens, scale=0.1).split(list(query_lens))
    order = [2, 0, 1]
    moved = Paged(
        [paged.k[i] for i in order],
        [paged.v[i] for i in order],
        paged.keys,
        paged.values,
        paged.block_tables[order],
    )
    again = prefill([q[i] for i in order], moved, [context_lens[i] for i in order], scale=0.1)
    assert torch.equal(again, torch.cat([out[i] for i in order]))


def decode(q: torch.Tensor, paged: Paged, lens: Sequence[int], **options) -> torch.Tensor:
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=q.device)
    with poisoned_memory():
        return attention_decode(q, paged.keys, paged.values, paged.block_tables, seq_lens, **options)


def check_decode(
    lens: Sequence[int],
    device: torch.device,
    heads: tuple[int, int] = (2, 1),
    dim: int = 64,
    dtype: torch.dtype = DTYPE,
    window: int | None = None,
    magnitude: float = 1.0,
    **pages,
) -> None:
    paged = make_pages(lens, heads[1], dim, dtype, device, magnitude, **pages)
    q = (torch.randn(len(lens), heads[0], dim, device=device) * magnitude).to(dtype)
    out = decode(q, paged, lens, scale=dim**-0.5, window=window)
    live = [s for s, n in enumerate(lens) if n]
    padded = [s for s, n in enumerate(lens) if not n]
    assert not out[padded].any()
    rows = Paged(
        [paged.k[s] for s in live], [paged.v[s] for s in live], paged.keys, paged.values, paged.block_tables
    )
    exact, plain = truth_and_plain([q[s : s + 1] for s in live], rows, dim**-0.5, window)
    assert_as_good_as_plain(out[live], plain, exact)


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_lengths(length: int, device: torch.device):
    check_decode((length,), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_decode_ragged_with_padded_rows(heads, dim, dtype, device):
    check_decode((1, 0, 16, 300, 17, 0, 129, 64, 0), device, heads, dim, dtype)


@pytest.mark.parametrize("window", [1, 16, 70, 200, 1000])
def test_decode_window(window: int, device: torch.device):
    check_decode((1, 16, 300, 90), device, window=window)


def test_decode_odd_head_dim_and_int32_tables(device: torch.device):
    check_decode((20, 3, 150), device, dim=24, ids=torch.int32)


@pytest.mark.parametrize("magnitude", [1e-3, 30.0])
def test_decode_magnitudes(magnitude: float, device: torch.device):
    check_decode((50, 200), device, magnitude=magnitude)


@pytest.mark.parametrize("rows", [40, 300])
def test_decode_long_splits_and_large_batches(rows: int, device: torch.device):
    # enough rows of one page or two, and a few that are cut; the interpreter takes long for each of them
    lens = [1 + i % 20 if GPU or i % (rows // 5) == 0 else 0 for i in range(rows)]
    lens[3], lens[rows - 1] = (9000, 1100) if GPU else (600, 530)
    check_decode(lens, device)


@pytest.mark.skipif(GPU, reason="a GPU has its own number of programs")
@pytest.mark.parametrize("processors", [1, 3, 10])
def test_decode_whatever_the_number_of_programs(processors: int, device, monkeypatch):
    monkeypatch.setattr(triton_decode, "_multiprocessors", lambda device: processors)
    # less than a row's splits, as 32 are for a long row on a GPU
    monkeypatch.setattr(triton_decode, "COMBINE_PIECE", 1)
    check_decode((150, 0, 1, 330, 64), device, heads=(6, 3), dim=16)
    check_decode((128,) * 5, device, heads=(3, 3), dim=16)


def test_decode_of_no_rows_is_no_launch(device: torch.device):
    paged = make_pages((5,), 1, 64, DTYPE, device)
    nothing = Paged([], [], paged.keys, paged.values, paged.block_tables[:0])
    assert decode(torch.empty(0, 2, 64, device=device, dtype=DTYPE), nothing, (), scale=0.1).shape == (
        0,
        2,
        64,
    )


@pytest.mark.parametrize("attend", [decode, prefill])
def test_what_would_be_read_wrongly_is_refused(attend: Callable[..., torch.Tensor], device: torch.device):
    paged = make_pages((5,), 2, 64, DTYPE, device)
    rows = torch.randn(1, 2, 64, device=device, dtype=DTYPE)
    # one row to decode, or one new token behind four
    q, lens = (rows, (5,)) if attend is decode else ([rows], (4,))
    with pytest.raises(AssertionError):
        attend(q, paged, lens, scale=0.0)
    turned = paged.keys.mT.contiguous().mT
    with pytest.raises(AssertionError):
        attend(q, Paged(paged.k, paged.v, turned, paged.values, paged.block_tables), lens, scale=0.1)
    strided = paged.block_tables.repeat_interleave(2, 1)[:, ::2]
    with pytest.raises(AssertionError):
        attend(q, Paged(paged.k, paged.v, paged.keys, paged.values, strided), lens, scale=0.1)


def test_decode_order_of_rows_changes_no_bit(device: torch.device):
    lens = (1, 300, 17, 0, 140, 64)
    paged = make_pages(lens, 1, 64, DTYPE, device)
    q = torch.randn(len(lens), 2, 64, device=device, dtype=DTYPE)
    out = decode(q, paged, lens, scale=0.1)
    order = [4, 3, 0, 5, 1, 2]
    moved = Paged(paged.k, paged.v, paged.keys, paged.values, paged.block_tables[order])
    assert torch.equal(decode(q[order], moved, [lens[i] for i in order], scale=0.1), out[order])


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_decode_reads_nothing_of_padded_rows(ids: torch.dtype, device: torch.device):
    lens = (70, 0, 300, 17)
    paged = make_pages(lens, 1, 64, DTYPE, device)
    q = torch.randn(len(lens), 2, 64, device=device, dtype=DTYPE)
    expected = decode(q, paged, lens, scale=0.1)
    # a wider table; what belongs to no page of a sequence names pages that do not exist
    width = paged.block_tables.shape[1]
    table = torch.full((len(lens), width + 3), 1 << 29, dtype=ids, device=device)
    live = torch.tensor([0, 2, 3], device=device)
    table[live, :width] = paged.block_tables[live].to(ids)
    moved = Paged(paged.k, paged.v, paged.keys, paged.values, table)
    assert torch.equal(decode(q, moved, lens, scale=0.1), expected)


def test_decode_of_a_row_keeps_its_bits_whatever_its_neighbours_lengths(device: torch.device):
    lens = (300, 17, 900, 1) if GPU else (300, 17, 140, 1)
    paged = make_pages(lens, 1, 64, DTYPE, device)
    q = torch.randn(len(lens), 2, 64, device=device, dtype=DTYPE)
    out = decode(q, paged, lens, scale=0.1)
    shorter = decode(q, paged, (300, 1, 0, 1), scale=0.1)
    assert torch.equal(out[[0, 3]], shorter[[0, 3]]) and not torch.equal(out[1:3], shorter[1:3])


def test_write_kv_stores_its_slots_and_skips_negative_ones(device: torch.device):
    paged = make_pages((40,), 2, 24, torch.float32, device)
    before = torch.as_strided(paged.keys, (paged.keys.untyped_storage().size() // 4,), (1,), 0)
    k, v = (torch.randn(3, 2, 48, device=device)[:, :, :24] for _ in range(2))
    slots = torch.tensor([33, -1, 47], device=device)
    key_slots, value_slots = paged.keys.flatten(0, 1), paged.values.flatten(0, 1)
    expected = before.clone()
    for slots_view, new in ((key_slots, k), (value_slots, v)):
        view = torch.as_strided(expected, slots_view.shape, slots_view.stride(), slots_view.storage_offset())
        view.index_copy_(0, slots[[0, 2]], new[[0, 2]])
    write_kv(k, v, key_slots, value_slots, slots)
    assert torch.equal(before.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("new", "context"), [(60, 0), (60, 20), (60, 32), (60, 48), (60, 80), (60, 93), (64, 0), (64, 48)]
)
def test_the_fused_forms_pieces_and_filling(new: int, context: int, device: torch.device, monkeypatch):
    """With a plain stand-in for cuDNN's operator: how its results are put together."""
    asked = []

    def stand_in(q, k, v, scale, *, causal):
        asked.append((len(q), len(k)))
        # a plan is of strides, too
        assert all(x.is_contiguous() for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(group, 1)) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float().repeat_interleave(group, 1))
        return out.to(q.dtype), scores.logsumexp(-1).T

    monkeypatch.setattr(fused, "_cudnn", stand_in)
    monkeypatch.setattr(fused, "CONTEXT_PIECES", (32, 16))
    monkeypatch.setattr(choice, "FUSED_LENGTHS", (64,))
    scale = 0.125
    paged = make_pages((new + context,), 1, 64, DTYPE, device)
    q = torch.randn(new, 2, 64, device=device, dtype=DTYPE)
    # values are a part of each token's projection
    v = torch.cat((paged.v[0], paged.k[0]), 2)[context:, :, :64]
    own = (paged.k[0][context:], v, paged.keys, paged.values, paged.block_tables[0])
    with poisoned_memory():
        out = fused.attention_prefill(q, *own, context, scale=scale)
    exact, plain = truth_and_plain([q], paged, scale, None)
    assert_as_good_as_plain(out, plain, exact, factor=3)
    assert all(rows == 64 for rows, _ in asked)
    assert sum(keys for _, keys in asked if keys != 64) == context // 16 * 16


@needs_gpu
@pytest.mark.parametrize(("heads", "dim"), [((16, 4), 256), ((8, 2), 128)])
@pytest.mark.parametrize(("new", "context"), [(4096, 0), (4000, 5000), (4096, 32768), (3900, 24700)])
def test_the_fastest_prefill_is_as_right(heads, dim: int, new: int, context: int, device: torch.device):
    query_lens, context_lens = (30, new, 0, 17), (50, context, 0, 0)
    lens = [n + c for n, c in zip(query_lens, context_lens, strict=True)]
    paged = make_pages(lens, heads[1], dim, DTYPE, device)
    q = torch.randn(sum(query_lens), heads[0], dim, device=device, dtype=DTYPE)
    k, v = (torch.cat([x[c:] for x, c in zip(xs, context_lens, strict=True)]) for xs in (paged.k, paged.v))
    tables = (paged.keys, paged.values, paged.block_tables)
    with poisoned_memory():
        out = choice.attention_prefill(q, k, v, *tables, query_lens, context_lens, scale=0.06)
    # the last rows of the long sequence, and the short ones whole
    at = 0
    for s, n in enumerate(query_lens):
        last = min(n, 64)
        part = slice(at + n - last, at + n)
        if n:
            single = Paged([paged.k[s]], [paged.v[s]], *tables)
            exact, plain = truth_and_plain([q[part]], single, 0.06, None)
            assert_as_good_as_plain(out[part], plain, exact)
        at += n
    ours = attention_prefill(q, k, v, *tables, query_lens, context_lens, scale=0.06)
    torch.testing.assert_close(out, ours, atol=2e-2, rtol=2e-2)
    room = torch.full_like(out, float("nan"))
    assert choice.attention_prefill(q, k, v, *tables, query_lens, context_lens, scale=0.06, out=room) is room
    assert torch.equal(room, out)


@needs_gpu
@pytest.mark.parametrize("check", [check_prefill, check_decode])
def test_pages_behind_two_to_the_31_elements(check: Callable[..., None], device: torch.device):
    lead = (6 << 30) // (PAGE * 4 * 256)
    if check is check_prefill:
        check((100, 30), (0, 200), device, (16, 4), 256, lead=lead)
    else:
        check((1, 700, 33), device, (16, 4), 256, lead=lead)


@needs_gpu
def test_no_compilation_after_the_first_lengths(device: torch.device):
    from hybridserve.kernels.attention import triton_prefill

    kernels = (triton_prefill._prefill_kernel, triton_decode._decode_kernel, triton_decode._combine_kernel)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    check_prefill((20,), (0,), device)
    check_decode((20, 30, 40), device)
    count = compiled()
    assert count
    for length in (1, 16, 17, 64, 128, 1000):
        check_prefill((length, 1), (0, length), device)
        check_decode((length, 1, 16), device)
    check_decode((5,) * 16, device)
    assert compiled() == count


@needs_gpu
def test_decode_in_a_cuda_graph_follows_lengths(device: torch.device):
    lens = (300, 17, 2000, 1)
    paged = make_pages(lens, 4, 256, torch.bfloat16, device)
    q = torch.randn(4, 16, 256, device=device, dtype=torch.bfloat16)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)

    def call() -> torch.Tensor:
        return attention_decode(q, paged.keys, paged.values, paged.block_tables, seq_lens, scale=0.06)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for shorter in (lens, (0, 3, 1999, 1), (299, 16, 5, 0)):
        seq_lens.copy_(torch.tensor(shorter))
        expected = call()
        graph.replay()
        assert torch.equal(out, expected)
