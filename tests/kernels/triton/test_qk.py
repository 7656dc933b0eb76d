"""Queries and keys before attention on the GPU (or interpreted): norm, rotary embedding, page write."""

import pytest
import torch

from hybridserve.kernels.rms_norm.cpu import rms_norm
from hybridserve.kernels.rms_norm.reference import rms_norm_reference
from hybridserve.kernels.rotary import cpu, triton_qk
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory, relative_error

# the interpreter truncates to bf16, where a GPU rounds
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * torch.cuda.is_available()
# tokens, query heads, KV heads, head dim, rotary dim, gate
SHAPES = [
    (1, 4, 2, 16, 4, True),
    (5, 5, 1, 40, 20, True),
    (3, 3, 3, 24, 0, False),
    (2, 24, 4, 64, 64, True),
]
FULL_SHAPES = [(1000, 16, 4, 256, 64, True), (129, 24, 4, 256, 64, True), (64, 8, 8, 128, 128, False)]
EPS, THETA, NUM_SLOTS = 1e-6, 1e7, 2000


class Inputs:
    def __init__(self, device, dtype, tokens, q_heads, kv_heads, dim, rotary_dim, gated):
        heads = (2 if gated else 1) * q_heads + 2 * kv_heads
        # a slice of a wider projection
        self.qkv = torch.full((tokens, heads * dim + 8), float("nan"), device=device, dtype=dtype)[:, 8:]
        self.qkv.copy_(torch.randn(tokens, heads * dim, device=device) * 2)
        sizes = [n * dim for n in (q_heads, q_heads * gated, kv_heads, kv_heads)]
        q, _, k, v = self.qkv.split(sizes, 1)
        self.q, self.k, self.v = (part.unflatten(1, (-1, dim)) for part in (q, k, v))
        self.weights = [1 + torch.randn(dim, device=device) for _ in range(2)]
        self.positions = torch.randint(0, 3000, (tokens,), device=device)
        self.rotary_dim, self.gated = rotary_dim, gated
        self.rotary = triton_qk.rotary_cos_sin(self.positions, rotary_dim, THETA)
        self.keys, self.values = (
            torch.full((NUM_SLOTS, kv_heads, dim), float("nan"), device=device, dtype=dtype) for _ in range(2)
        )
        self.slots = torch.randperm(NUM_SLOTS, device=device)[:tokens]

    def run(self, k_out=None):
        with poisoned_memory():
            return triton_qk.qk_norm_rope_write(
                self.qkv,
                *self.weights,
                EPS,
                self.rotary,
                self.keys,
                self.values,
                self.slots,
                gated=self.gated,
                k_out=k_out,
            )

    def check(self, out, x, weight):
        """`out` is x normed and rotated, as well as plain PyTorch's fused into fp32."""
        exact = rms_norm_reference(x.double(), weight.double(), EPS, zero_centered=False)
        exact = rotate_fp64(exact, *self.rotary)
        plain = rms_norm(x.float(), weight, EPS, zero_centered=False)
        plain = cpu.apply_rotary(plain, *self.rotary).to(x.dtype)
        assert_as_good_as_plain(out, plain, exact)


def rotate_fp64(x, cos, sin):
    half = cos.shape[1]
    cos, sin = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rotate_and_write(device, dtype):
    for shape in SHAPES + (FULL_SHAPES if device.type == "cuda" else []):
        inputs = Inputs(device, dtype, *shape)
        q = inputs.run()
        assert q.is_contiguous() and q.dtype == dtype
        inputs.check(q, inputs.q, inputs.weights[0])
        inputs.check(inputs.keys[inputs.slots], inputs.k, inputs.weights[1])
        assert torch.equal(inputs.values[inputs.slots], inputs.v)
        other = torch.ones(NUM_SLOTS, dtype=torch.bool, device=device)
        other[inputs.slots] = False
        assert inputs.keys[other].isnan().all() and inputs.values[other].isnan().all()


def test_padding_touches_no_page(device):
    inputs = Inputs(device, torch.float32, 4, 2, 2, 32, 16, True)
    inputs.slots[1] = -1
    inputs.slots[3] = -5
    q = inputs.run()
    assert not q.isnan().any()
    assert inputs.keys.isnan().all((1, 2)).sum() == NUM_SLOTS - 2
    assert inputs.values.isnan().all((1, 2)).sum() == NUM_SLOTS - 2
    assert torch.equal(inputs.values[inputs.slots[2]], inputs.v[2])


def test_keys_are_given_back_where_asked(device):
    inputs = Inputs(device, torch.float32, 5, 2, 3, 32, 16, True)
    k_out = torch.full((5, 3, 32), float("nan"), device=device)
    q = inputs.run(k_out)
    keys = inputs.keys[inputs.slots]
    assert torch.equal(k_out, keys)
    assert torch.equal(q, inputs.run())
    # of padding, too
    k_out.fill_(torch.nan)
    inputs.slots[2] = -1
    inputs.run(k_out)
    assert torch.equal(k_out, keys)


@pytest.mark.parametrize("scale", [1e-5, 1e5])
def test_tiny_and_large_heads(device, scale):
    inputs = Inputs(device, torch.float32, 4, 2, 2, 32, 16, True)
    inputs.qkv.mul_(scale)
    inputs.qkv[1] = 0
    q = inputs.run()
    inputs.check(q, inputs.q, inputs.weights[0])
    assert not q[1].any()


def test_tokens_are_bitwise_their_own_in_any_batch(device):
    inputs = Inputs(device, torch.float32, 9, 4, 2, 32, 16, True)
    q = inputs.run()
    keys = inputs.keys[inputs.slots]
    order = torch.randperm(9, device=device)
    inputs.qkv, inputs.slots = inputs.qkv[order], inputs.slots[order]
    inputs.rotary = tuple(part[order] for part in inputs.rotary)
    assert torch.equal(inputs.run(), q[order])
    assert torch.equal(inputs.keys[inputs.slots], keys[order])


def test_cos_and_sin_at_far_positions(device):
    """Against fp64 cosines of the fp32 angles: an error of the argument's reduction would be of order 1."""
    positions = torch.tensor([0, 1, 2, 1000, 32767, 131071, 131072, 262143, 1048575], device=device)
    cos, sin = triton_qk.rotary_cos_sin(positions, 64, THETA)
    exponent = torch.arange(0, 64, 2, dtype=torch.float32) / 64
    angles = (positions.cpu().float()[:, None] * (1.0 / THETA**exponent)).double()
    assert (cos.cpu().double() - angles.cos()).abs().max() < 2e-7
    assert (sin.cpu().double() - angles.sin()).abs().max() < 2e-7
    plain = cpu.rotary_cos_sin(positions.cpu(), 64, THETA)
    assert relative_error(cos, plain[0]) < 1e-6 and relative_error(sin, plain[1]) < 1e-6


def test_no_tokens_are_no_launch(device):
    inputs = Inputs(device, torch.float32, 0, 2, 1, 32, 16, True)
    assert inputs.run().shape == (0, 2, 32)


def test_no_recompile_whatever_the_lengths(gpu, count_variants):
    kernels = triton_qk._qk_norm_rope_write_kernel, triton_qk._cos_sin_kernel
    Inputs(gpu, torch.bfloat16, 7, 16, 4, 256, 64, True).run()
    before = count_variants(*kernels)
    for tokens in (1, 2, 16, 63, 64, 1000):
        Inputs(gpu, torch.bfloat16, tokens, 16, 4, 256, 64, True).run()
    assert count_variants(*kernels) == before


def test_slots_beyond_two_to_the_31_elements(gpu):
    inputs = Inputs(gpu, torch.bfloat16, 5, 16, 4, 256, 64, True)
    inputs.run()
    keys = inputs.keys[inputs.slots]
    slots = 2**31 // 1024 + 100
    inputs.keys, inputs.values = (
        torch.empty(slots, 4, 256, dtype=torch.bfloat16, device=gpu) for _ in range(2)
    )
    inputs.slots = torch.arange(slots - 5, slots, device=gpu)
    inputs.run()
    assert torch.equal(inputs.keys[-5:], keys) and torch.equal(inputs.values[-5:], inputs.v)
