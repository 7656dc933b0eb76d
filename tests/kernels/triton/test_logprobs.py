"""Log probabilities on the device against fp64 and the CPU path."""

import pytest
import torch

from hybridserve.kernels.sampler import cpu
from hybridserve.kernels.sampler.triton_logprobs import MAX_TOP, token_logprobs
from hybridserve.kernels.testing import assert_as_good_as_plain, poisoned_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "num_top"), [(1, 1), (700, 0), (700, 5), (3001, 20)])
def test_logprobs(device, vocab, num_top, dtype):
    logits = (torch.randn(4, vocab) * 4).to(device, dtype)
    logits[1] = logits[1].round()
    ids = torch.randint(vocab, (4,)).to(device)
    with poisoned_memory():
        logprob, rank, top_ids, top_logprobs = token_logprobs(logits, ids, num_top, chunk=512)
    plain = cpu.token_logprobs(logits.cpu().float(), ids.cpu(), num_top)
    truth = cpu.token_logprobs(logits.cpu().double(), ids.cpu(), num_top)
    assert torch.equal(rank.cpu(), truth[1])
    assert torch.equal(top_ids.cpu(), truth[2])
    assert_as_good_as_plain(logprob, plain[0], truth[0])
    if num_top:
        assert_as_good_as_plain(top_logprobs, plain[3], truth[3])


def test_logprobs_of_long_rows(gpu):
    logits, ids = torch.randn(40, 248320, device=gpu) * 3, torch.randint(248320, (40,), device=gpu)
    logprob, rank, top_ids, top_logprobs = token_logprobs(logits, ids, MAX_TOP)
    plain, truth = (cpu.token_logprobs(x, ids, MAX_TOP) for x in (logits, logits.double()))
    assert torch.equal(rank, truth[1])
    assert torch.equal(top_ids, truth[2])
    assert_as_good_as_plain(logprob, plain[0], truth[0])
    assert_as_good_as_plain(top_logprobs, plain[3], truth[3])


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_equal_tokens_rank_by_rising_id(device, value):
    logits = torch.full((2, 600), value, device=device)
    logits[:, ::2] = 0.0
    _, rank, ids, logprobs = token_logprobs(logits, torch.tensor([5, 599], device=device), 4, chunk=256)
    assert rank.tolist() == [1, 1]
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(logprobs[0], logprobs[1])


@pytest.mark.parametrize("num_top", [-1, 65])
def test_num_top_out_of_range(device, num_top):
    with pytest.raises(ValueError, match=f"num_top is {num_top}"):
        token_logprobs(torch.zeros(1, 100, device=device), torch.zeros(1, dtype=torch.int64), num_top)
