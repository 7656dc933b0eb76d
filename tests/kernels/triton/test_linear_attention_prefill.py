"""Prefill of linear attention in Triton: against the recurrence in fp64, where states lie in poisoned bytes.

Without a GPU the interpreter runs the kernels on small shapes, in fp32 and fp16 (it has no bf16 products).
"""

from dataclasses import dataclass, replace

import pytest
import torch

from hybridserve.kernels.linear_attention import chunkwise
from hybridserve.kernels.linear_attention import triton_prefill as prefill
from hybridserve.kernels.linear_attention.cpu import MIN_LOG_DECAY
from hybridserve.kernels.linear_attention.reference import l2norm_reference, linear_attention_reference
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory, relative_error

CUDA = torch.cuda.is_available()
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float16, torch.float32]
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 1000, 4096) if CUDA else (1, 2, 15, 16, 17, 33, 65)
RAGGED = (5, 0, 130, 64, 1, 0, 63, 1000, 2) if CUDA else (5, 0, 40, 1)
HEAD = (16, 32, 128, 128) if CUDA else (1, 2, 32, 32)


@pytest.fixture
def device() -> str:
    return "cuda" if CUDA else "cpu"


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None

    def fields(self) -> tuple[torch.Tensor | None, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def map(self, change) -> "Inputs":
        return Inputs(*(None if x is None else change(x) for x in self.fields()))

    def tokens(self, start: int, end: int) -> "Inputs":
        return self.map(lambda x: x[start:end])


def make_inputs(tokens, dims, device, dtype, decay="head", beta=True, spread=1.0) -> Inputs:
    k_heads, v_heads, k_dim, v_dim = dims
    channels = {"head": (), "channel": (k_dim,), "none": None}[decay]

    def normal(heads: int, dim: int) -> torch.Tensor:
        norms = spread ** (torch.rand(tokens, heads, 1, device=device) * 2 - 1)
        return (torch.randn(tokens, heads, dim, device=device) * norms).to(dtype)

    g = None
    if channels is not None:
        g = -torch.rand(tokens, v_heads, *channels, device=device).mul_(3).exp_().mul_(0.05)
    b = torch.rand(tokens, v_heads, device=device) if beta else None
    return Inputs(normal(k_heads, k_dim), normal(k_heads, k_dim), normal(v_heads, v_dim), g, b)


def plain_chunkwise(inputs: Inputs, initial: torch.Tensor, scale=None, qk_l2norm=True):
    """One sequence as plain PyTorch computes it on tensor cores: sums in fp32, each product's operands in the
    dtype of v."""
    dtype, key_dim = inputs.v.dtype, inputs.q.shape[-1]
    q, k, v, g, beta = inputs.map(torch.Tensor.float).fields()
    group = v.shape[1] // k.shape[1]
    if qk_l2norm:
        q, k = l2norm_reference(q), l2norm_reference(k)
    q = q * (key_dim**-0.5 if scale is None else scale)
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    g = torch.zeros_like(k[..., :1]) if g is None else g.clamp(min=MIN_LOG_DECAY).view(*g.shape[:2], -1)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.to(dtype) @ b.to(dtype)).float()

    state, outs = initial.float(), []
    for start in range(0, v.shape[0], 64):
        part = slice(start, start + 64)
        qs, ks, vs, gs = (x[part].transpose(0, 1) for x in (q, k, v, g))
        total = gs.double().cumsum(1)
        between = (total[:, :, None] - total[:, None]).clamp(max=0).exp()
        into, out_of = total.exp().float(), (total[:, -1:] - total).exp().float()
        if g.shape[-1] == 1:
            scores = product(qs, ks.mT).tril() * between[..., 0].float()
            kk = product(ks, ks.mT) * between[..., 0].float()
        else:
            scores = torch.einsum("hik,hjk,hijk->hij", qs.double(), ks.double(), between).tril().float()
            kk = torch.einsum("hik,hjk,hijk->hij", ks.double(), ks.double(), between).float()
        u = vs
        if beta is not None:
            b = beta[part].transpose(0, 1)
            inverse = chunkwise.unit_lower_inverse((kk * b[..., None]).tril(-1)) * b[:, None]
            u = product(inverse, vs - product(ks * into, state.mT))
        outs.append((product(qs * into, state.mT) + product(scores, u)).transpose(0, 1))
        decay = total[:, -1:].exp().float()
        state = state * decay + product(u.mT, ks * out_of)
    return torch.cat(outs).to(dtype), state


def arena(row_shape, count, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes of 0xFF, rows at every 256 of them, and `count` rows that do not overlap, in random order."""
    row_size = row_shape[0] * row_shape[1] * row_shape[2]
    steps = -(-row_size // 64) + 1
    buffer = torch.full(((count + 1) * steps * 256,), 0xFF, dtype=torch.uint8, device=device)
    rows = (buffer.numel() // 4 - row_size) // 64 + 1
    strides = (64, row_shape[1] * row_shape[2], row_shape[2], 1)
    view = buffer.view(torch.float32).as_strided((rows, *row_shape), strides)
    return buffer, view, torch.randperm(count, device=device) * steps


def run(inputs: Inputs, lens, initial, known, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states [S, Hv, V, K] (of sequences with tokens); checks that nothing else changed."""
    device, count = inputs.v.device, len(lens)
    row_shape = (*inputs.v.shape[1:], inputs.k.shape[-1])
    buffer, view, rows = arena(row_shape, count + 1, device)
    indices, has_initial_state = rows[:count], torch.tensor(known, device=device)
    for s in range(count):
        if known[s]:
            view[indices[s]] = initial[s]
    before = buffer.clone()
    with poisoned_memory():
        out = prefill.linear_attention_prefill(
            *inputs.fields(), view, indices, has_initial_state, lens, **options
        )
    states = torch.stack([view[index].clone() for index in indices])
    for s in range(count):
        if lens[s]:
            first = int(indices[s]) * 256
            size = states[s].numel() * 4
            buffer[first : first + size] = before[first : first + size]
    assert torch.equal(buffer, before)
    return out, states


def check(inputs: Inputs, lens, **options) -> None:
    """Outputs and states of a ragged batch, every second sequence continued, against fp64."""
    dims = (*inputs.v.shape[1:], inputs.k.shape[-1])
    known = [s % 2 == 0 for s in range(len(lens))]
    initial = torch.randn(len(lens), *dims, device=inputs.v.device)
    initial *= torch.tensor(known, device=initial.device)[:, None, None, None]
    out, states = run(inputs, lens, initial, known, **options)
    start, truth, plain, kept = 0, [], [], []
    for s, length in enumerate(lens):
        if length:
            part = inputs.tokens(start, start + length)
            wide = part.map(torch.Tensor.double)
            truth.append(linear_attention_reference(*wide.fields(), initial[s].double(), **options))
            plain.append(plain_chunkwise(part, initial[s], **options))
            kept.append(states[s])
        start += length
    # sums over the whole batch: one token's error is a matter of luck
    assert_as_good_as_plain(out, torch.cat([o for o, _ in plain]), torch.cat([o for o, _ in truth]))
    assert_as_good_as_plain(
        torch.stack(kept), torch.stack([s for _, s in plain]), torch.stack([s for _, s in truth])
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length, device):
    check(make_inputs(length, HEAD, device, DTYPES[0]), (length,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("decay", ["head", "channel", "none"])
def test_families(decay, beta, dtype, device):
    dims = (1, 2, 32, 32)
    if CUDA:
        dims = (2, 4, 128, 128) if dtype == torch.bfloat16 else (2, 4, 64, 64)
    check(make_inputs(sum(RAGGED), dims, device, dtype, decay, beta), RAGGED)


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize(
    "dims",
    [(2, 2, 64, 32), (1, 3, 48, 40), (1, 8, 256, 64), (2, 4, 96, 192), (4, 4, 64, 256), (2, 6, 128, 64)]
    if CUDA
    else [(1, 3, 48, 40), (2, 4, 16, 16)],
)
def test_head_sizes(dims, decay, device):
    check(make_inputs(sum(RAGGED), dims, device, DTYPES[0], decay), RAGGED)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("g", [-20.0, 0.0])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_extreme_gates(decay, g, beta, device):
    dims = (2, 4, 128, 128) if CUDA else (1, 1, 32, 32)
    lens = (130, 70) if CUDA else (40,)
    inputs = make_inputs(sum(lens), dims, device, DTYPES[0], decay)
    inputs = replace(inputs, g=torch.full_like(inputs.g, g), beta=torch.full_like(inputs.beta, beta))
    check(inputs, lens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_weak_decay_after_strong(decay, dtype, device):
    dims, length = ((2, 4, 64, 64), 256) if CUDA else ((1, 1, 32, 32), 64)
    inputs = make_inputs(length, dims, device, dtype, decay)
    g = torch.where(torch.rand_like(inputs.g) < 0.3, -100.0, -1e-3)
    g[length // 2 + 1] = -torch.inf
    check(replace(inputs, g=g), (length,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_alike_keys_do_not_cancel(dtype, device):
    dims, length = ((2, 4, 64, 64), 256) if CUDA else ((1, 1, 32, 32), 64)
    inputs = make_inputs(length, dims, device, dtype, "none")
    k = inputs.k[:1].expand_as(inputs.k).contiguous()
    check(replace(inputs, k=k, beta=torch.ones_like(inputs.beta)), (length,))


# fp32 too: in half precision, the norm's epsilon is lost in what rounding may err
@pytest.mark.parametrize("dtype", [DTYPES[0], torch.float32])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_norms_of_every_size(decay, dtype, device):
    dims = (2, 4, 128, 128) if CUDA else (1, 2, 32, 32)
    check(make_inputs(sum(RAGGED), dims, device, dtype, decay, spread=1e3), RAGGED)


def test_without_norm_and_with_scale(device):
    dims = (2, 4, 128, 128) if CUDA else (1, 2, 32, 32)
    inputs = make_inputs(sum(RAGGED), dims, device, DTYPES[0])
    check(replace(inputs, k=inputs.k * 0.05), RAGGED, scale=0.3, qk_l2norm=False)


def test_inputs_may_be_slices_of_one_projection(device):
    k_heads, v_heads, k_dim, v_dim = dims = (2, 4, 128, 128) if CUDA else (1, 2, 32, 32)
    whole = make_inputs(sum(RAGGED), dims, device, DTYPES[0])
    flat = torch.cat([x.flatten(1) for x in (whole.q, whole.k, whole.v)], 1)
    q, k, v = flat.split([k_heads * k_dim, k_heads * k_dim, v_heads * v_dim], 1)
    views = (q.unflatten(1, (-1, k_dim)), k.unflatten(1, (-1, k_dim)), v.unflatten(1, (-1, v_dim)))
    initial, known = torch.zeros(len(RAGGED), v_heads, v_dim, k_dim), [False] * len(RAGGED)
    apart = run(Inputs(*views, whole.g, whole.beta), RAGGED, initial, known)
    together = run(whole, RAGGED, initial, known)
    assert torch.equal(apart[0], together[0])
    some = [s for s, length in enumerate(RAGGED) if length]
    assert torch.equal(apart[1][some], together[1][some])


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_permuted_batch_is_bitwise_the_same(decay, device):
    dims, lens = ((2, 4, 128, 128), (70, 5, 200, 64)) if CUDA else ((1, 1, 32, 32), (33, 5, 17))
    inputs = make_inputs(sum(lens), dims, device, DTYPES[0], decay)
    count = len(lens)
    initial, known = torch.randn(count, dims[1], dims[3], dims[2], device=device), [True] * count
    out, states = run(inputs, lens, initial, known)
    order = list(range(1, count)) + [0]
    parts = torch.arange(sum(lens), device=device).split(lens)
    tokens = torch.cat([parts[s] for s in order])
    turned_out, turned_states = run(
        inputs.map(lambda x: x[tokens]), tuple(lens[s] for s in order), initial[order], known
    )
    assert torch.equal(turned_out, out[tokens])
    assert torch.equal(turned_states, states[order])


def test_cut_at_a_chunk_is_bitwise_the_whole(device):
    dims, length, cut = ((2, 4, 128, 128), 200, 128) if CUDA else ((1, 1, 32, 32), 80, 64)
    inputs = make_inputs(length, dims, device, DTYPES[0])
    initial = torch.randn(1, dims[1], dims[3], dims[2], device=device)
    out, state = run(inputs, (length,), initial, [True])
    first, middle = run(inputs.tokens(0, cut), (cut,), initial, [True])
    second, end = run(inputs.tokens(cut, length), (length - cut,), middle, [True])
    assert torch.equal(torch.cat((first, second)), out)
    assert torch.equal(end, state)


def test_a_poisoned_sequence_stays_alone(device):
    dims, lens = ((2, 4, 128, 128), (70, 65, 64)) if CUDA else ((1, 1, 32, 32), (20, 17, 16))
    inputs = make_inputs(sum(lens), dims, device, DTYPES[0])
    initial, known = torch.randn(3, dims[1], dims[3], dims[2], device=device), [True] * 3
    out, states = run(inputs, lens, initial, known)
    bad = slice(lens[0], lens[0] + lens[1])
    poisoned = inputs.map(torch.clone)
    for x in poisoned.fields():
        x[bad] = torch.nan
    poisoned_out, poisoned_states = run(poisoned, lens, initial, known)
    for part in (slice(0, bad.start), slice(bad.stop, None)):
        assert torch.equal(poisoned_out[part], out[part])
    assert torch.equal(poisoned_states[[0, 2]], states[[0, 2]])


def test_a_negative_row_is_not_touched(device):
    dims, lens = ((2, 4, 128, 128), (70, 65)) if CUDA else ((1, 1, 32, 32), (20, 17))
    inputs = make_inputs(sum(lens), dims, device, DTYPES[0])
    state = torch.randn(2, dims[1], dims[3], dims[2], device=device)
    before, known = state.clone(), torch.tensor([True, True], device=device)
    both = prefill.linear_attention_prefill(
        *inputs.fields(), state.clone(), torch.tensor([0, 1], device=device), known, lens
    )
    out = prefill.linear_attention_prefill(
        *inputs.fields(), state, torch.tensor([-1, 1], device=device), known, lens
    )
    assert torch.equal(out[lens[0] :], both[lens[0] :])
    assert torch.equal(state[0], before[0]) and not torch.equal(state[1], before[1])


@pytest.mark.parametrize("lens", [(130,), (70, 65)])
def test_without_initial_states_none_are_copied_and_outputs_go_where_they_are_to(lens, device):
    """Few sequences, for whom several programs share a head: these read copies of the states."""
    dims = (2, 4, 128, 128) if CUDA else (1, 2, 64, 64)
    inputs = make_inputs(sum(lens), dims, device, torch.bfloat16)
    known = [False] * len(lens)
    out, states = run(inputs, lens, None, known)
    room = torch.full((sum(lens) + 9, *dims[1:2], dims[3]), float("nan"), device=device, dtype=torch.bfloat16)
    given, again = run(inputs, lens, None, known, any_initial_state=False, out=room[5 : 5 + sum(lens)])
    assert given.data_ptr() == room[5].data_ptr()
    assert torch.equal(given, out) and torch.equal(again, states)
    assert room[:5].isnan().all() and room[5 + sum(lens) :].isnan().all()
    state = torch.zeros(len(lens), *states.shape[1:], device=device)
    index, fresh = torch.arange(len(lens), device=device), torch.tensor(known, device=device)
    for wrong in (room, room[: sum(lens)].float(), room[::2][: sum(lens)]):
        with pytest.raises(AssertionError):
            prefill.linear_attention_prefill(*inputs.fields(), state, index, fresh, lens, out=wrong)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_gates_and_states_that_would_be_read_wrongly_are_refused(decay, device):
    inputs = make_inputs(5, (1, 2, 32, 32), device, DTYPES[0], decay)
    rows = (torch.tensor([0], device=device), torch.tensor([False], device=device), (5,))

    def refused(given: Inputs, heads: int = 2) -> None:
        state = torch.zeros(1, heads, 32, 32, device=device)
        with pytest.raises(AssertionError):
            prefill.linear_attention_prefill(*given.fields(), state, *rows)

    for name in ("g", "beta"):
        gate = getattr(inputs, name)
        refused(replace(inputs, **{name: gate.repeat_interleave(2, 1)[:, ::2]}))
        refused(replace(inputs, **{name: gate[:, :1].contiguous()}))
    refused(inputs, heads=1)


def test_states_may_be_bf16(device):
    dims, length = ((2, 4, 128, 128), 100) if CUDA else ((1, 1, 32, 32), 20)
    inputs = make_inputs(length, dims, device, torch.float32)
    state = torch.randn(1, dims[1], dims[3], dims[2], device=device).bfloat16()
    wide = state.float()
    index, known = torch.tensor([0], device=device), torch.tensor([True], device=device)
    out = prefill.linear_attention_prefill(*inputs.fields(), state, index, known, (length,))
    same = prefill.linear_attention_prefill(*inputs.fields(), wide, index, known, (length,))
    assert torch.equal(out, same)
    assert relative_error(state, wide) <= torch.finfo(torch.bfloat16).eps


@pytest.mark.skipif(not CUDA, reason="needs a GPU: 9 GB of states")
def test_states_behind_more_than_2_to_the_31_numbers(device):
    dims, lens, step = (2, 4, 128, 128), (100, 70), 65536
    inputs = make_inputs(sum(lens), dims, device, torch.bfloat16)
    initial, known = torch.randn(2, 4, 128, 128, device=device), [True, True]
    out, states = run(inputs, lens, initial, known)
    count = 2**31 // step + 3
    state = torch.empty(count * step, device=device).as_strided((count, 4, 128, 128), (step, 16384, 128, 1))
    indices = torch.tensor([count - 1, count - 2], device=device)
    state[indices] = initial
    has_initial_state = torch.tensor(known, device=device)
    far = prefill.linear_attention_prefill(*inputs.fields(), state, indices, has_initial_state, lens)
    assert torch.equal(far, out)
    assert torch.equal(state[indices], states)


@pytest.mark.skipif(not CUDA, reason="needs a GPU: compiled kernels")
def test_lengths_compile_nothing_new(device):
    kernels = (prefill.head_tiles_kernel, prefill.delta_scan_kernel, prefill.copy_states_kernel)

    def variants() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def step(*lens: int) -> None:
        inputs = make_inputs(sum(lens), HEAD, device, torch.bfloat16)
        state = torch.zeros(len(lens), 32, 128, 128, device=device)
        indices = torch.arange(len(lens), device=device)
        prefill.linear_attention_prefill(*inputs.fields(), state, indices, indices < 0, lens)

    # one program a head, or two; two sequences, or many
    step(64)
    step(64, 64)
    step(64, 64, 64)
    before = variants()
    for lens in [(1,), (16,), (17, 3), (64, 1, 5), (1000,), (16,) * 5, (1,) * 16, (0, 3, 0, 128), (4096, 7)]:
        step(*lens)
    assert variants() == before


@pytest.mark.parametrize(("chunk", "lens"), [(64, (100,)), (16, (70, 0, 16, 3)), (16, (100,))])
@pytest.mark.parametrize("tma", [True, False])
def test_tilings_of_bf16_in_fp32(tma, chunk, lens, device, monkeypatch):
    """What the interpreter cannot run in bf16; one short sequence is done in parts."""
    dims = (2, 4, 32, 32)
    tiling = replace(prefill.Tiling.choose(torch.float32, 32, 32, False, True), chunk=chunk, tma=tma)
    monkeypatch.setattr(prefill.Tiling, "choose", lambda *_: tiling)
    check(make_inputs(sum(lens), dims, device, torch.float32), lens)
