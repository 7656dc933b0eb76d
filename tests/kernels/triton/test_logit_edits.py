"""Penalties, biases and bans of a batch, bit for bit what the CPU path does to one row."""

import pytest
import torch

from hybridserve.kernels.sampler import cpu, cpu_batch
from hybridserve.kernels.sampler.triton_greedy import greedy
from hybridserve.kernels.sampler.triton_penalties import bias_batch, penalize_batch

REPETITION = (1.0, 1.3, 0.7, 1.0, 2.0, 1.1, 1.0)
PRESENCE = (0.0, 0.5, 0.0, -1.0, 0.3, 0.1, 0.0)
FREQUENCY = (0.0, 0.25, 0.0, 0.1, 0.7, -0.3, 0.9)
PROMPTS = (3, 0, 40, 2, 1030, 0, 5)
OUTPUTS = (9, 17, 1, 0, 1500, 0, 30)


@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
def test_penalties_are_the_cpu_paths(device, id_dtype):
    rows, vocab, longest = len(PROMPTS), 301, 2600
    lens = torch.tensor(PROMPTS) + torch.tensor(OUTPUTS)
    # what lies past a row's end is no id
    ids = torch.full((rows, longest), 2**31 - 1)
    for row, n in enumerate(lens.tolist()):
        ids[row, :n] = torch.randint(vocab, (n,))
    logits = torch.randn(rows, vocab) * 3
    expected = logits.clone()
    for row, (prompt, n) in enumerate(zip(PROMPTS, lens.tolist(), strict=True)):
        history = ids[row, :n]
        penalties = (REPETITION[row], PRESENCE[row], FREQUENCY[row])
        cpu.penalize(expected[row], history[:prompt], history[prompt:], *penalties)
    given = [
        ids.to(device, id_dtype),
        torch.tensor(PROMPTS, device=device),
        lens.to(device),
        *(torch.tensor(x, device=device) for x in (REPETITION, PRESENCE, FREQUENCY)),
    ]
    counts = torch.zeros(rows + 1, vocab, dtype=torch.int32, device=device)
    for table in (counts, counts, None):
        edited = logits.to(device, copy=True)
        penalize_batch(edited, *given, counts=table)
        assert torch.equal(edited.cpu(), expected)
    assert not bool(counts.any())
    plain = logits.clone()
    cpu_batch.penalize_batch(plain, *(x.cpu() for x in given))
    assert torch.equal(plain, expected)


def test_plain_penalties_round_alike_on_a_gpu(gpu):
    """The benchmark's truth is the plain form there: dividing by a number would multiply by a reciprocal."""
    logits, ids = torch.randn(5000) * 3, torch.arange(5000)
    moved = logits.to(gpu)
    cpu.penalize(logits, ids[:2500], ids[2500:], 1.1, 0.5, 0.1)
    cpu.penalize(moved, ids[:2500].to(gpu), ids[2500:].to(gpu), 1.1, 0.5, 0.1)
    assert torch.equal(moved.cpu(), logits)


def test_penalties_of_half_precision_logits(device):
    # small whole numbers, so that every result is exact in bf16
    logits = torch.randint(-8, 9, (2, 64)).to(device, torch.bfloat16)
    expected = logits.float()
    ids = torch.tensor([[1, 2, 3, 3], [5, 5, 5, 0]], device=device)
    lens = torch.tensor([4, 3], device=device)
    one = torch.ones(2, device=device)
    expected[0, [1, 2]] -= 1.5
    expected[0, 3] -= 2.0
    expected[1, 5] -= 2.5
    plain = logits.clone().cpu()
    given = [ids, lens * 0, lens, one, one, one * 0.5]
    penalize_batch(logits, *given)
    assert torch.equal(logits, expected.bfloat16())
    cpu_batch.penalize_batch(plain, *(x.cpu() for x in given))
    assert torch.equal(plain, logits.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_biases_then_bans(device, dtype):
    logits = torch.randint(-8, 9, (3, 500)).to(device, dtype)
    before = logits.clone()
    bias_ids = torch.tensor([[7, 499, -1], [-1, -1, -1], [0, 1, 2]], device=device)
    biases = torch.tensor([[100.0, -3.5, 9.0], [1.0, 2.0, 3.0], [0.5, 0.25, 50.0]], device=device)
    banned = torch.tensor([[7, -1], [-1, 500], [3, 2]], device=device)
    plain = logits.clone().cpu()
    bias_batch(logits, bias_ids, biases, banned)
    cpu_batch.bias_batch(plain, bias_ids.cpu(), biases.cpu(), banned.cpu())
    assert torch.equal(plain, logits.cpu())
    lowest = torch.finfo(dtype).min
    assert logits[0, 7] == lowest
    assert logits[2, 2] == logits[2, 3] == lowest
    assert logits[0, 499] == before[0, 499] - 3.5
    assert logits[2, 0] == before[2, 0] + 0.5
    assert torch.equal(logits[1], before[1])
    touched = torch.zeros(3, 500, dtype=torch.bool, device=device)
    touched[0, [7, 499]] = touched[2, :4] = True
    assert torch.equal(logits[~touched], before[~touched])
    assert bool(greedy(logits)[1].all())
    bias_batch(logits, bias_ids[:, :0], biases[:, :0], banned[:, :0])
