"""Sampling over 248,320 tokens: greedy, by temperature, top-k, top-p, and what penalties and logprobs add.

The floor is one read of the logits. Goals of filtered sampling are one read plus 3 % of a decode step.
"""

from collections.abc import Callable

import torch
from case import Calls, Case

from hybridserve.kernels.sampler import cpu
from hybridserve.kernels.sampler.triton_greedy import greedy
from hybridserve.kernels.sampler.triton_logprobs import token_logprobs
from hybridserve.kernels.sampler.triton_penalties import penalize_batch
from hybridserve.kernels.sampler.triton_sample import sample, sample_seeded
from hybridserve.kernels.testing import Work, assert_as_good_as_plain, rotations

VOCAB = 248320
DEVICE = "cuda"
# 3 % of a step that reaches its goal, 4.3, 5.4 and 13.2 ms
EXTRA_US = {1: 129.0, 32: 162.0, 256: 396.0}
GREEDY_GOAL_US = {1: 25.0}
FILTERS = {
    "plain temperature": {},
    "top-k 40": {"top_k": 40},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 40, top-p 0.9": {"top_k": 40, "top_p": 0.9},
}


def flat(rows: int) -> torch.Tensor:
    """Logits as random weights give them: tens of thousands of tokens make up 0.9 of the mass."""
    return torch.randn(rows, VOCAB, device=DEVICE) * 1.3


def peaked(rows: int) -> torch.Tensor:
    """Logits that fall as a power of the rank, in random order: a few hundred tokens make up 0.9."""
    zipf = -1.3 * torch.arange(1, VOCAB + 1, device=DEVICE).log() + 12
    return torch.stack([zipf[torch.randperm(VOCAB, device=DEVICE)] for _ in range(rows)])


def options(
    rows: int, temperature: float = 0.7, top_k: int = 0, top_p: float = 1.0
) -> tuple[torch.Tensor, ...]:
    """temperature 0.7, top_k, top_p, min_p."""
    return (
        torch.full((rows,), 0.7, device=DEVICE),
        torch.full((rows,), top_k, device=DEVICE),
        torch.full((rows,), top_p, device=DEVICE),
        torch.zeros(rows, device=DEVICE),
    )


def inputs(make: Callable[[int], torch.Tensor], rows: int) -> list[torch.Tensor]:
    return [make(rows) for _ in range(min(rotations(rows * VOCAB * 4), 24))]


def greedy_case(rows: int) -> Case:
    def gate() -> None:
        logits = flat(rows)
        tokens, finite = greedy(logits)
        assert torch.equal(tokens, logits.argmax(-1))
        assert bool(finite.all())

    work = Work(nbytes=rows * VOCAB * 4)
    return Case(
        operator="sampler greedy, finite flag",
        shape=f"{rows} x {VOCAB} fp32",
        work=work,
        calls=lambda: [lambda x=x: greedy(x) for x in inputs(flat, rows)],
        gate=gate,
        goal_us=GREEDY_GOAL_US.get(rows),
        plain=lambda: [lambda x=x: (x.argmax(-1), cpu.rows_finite(x)) for x in inputs(flat, rows)],
    )


def sample_case(rows: int, name: str, make: Callable[[int], torch.Tensor]) -> Case:
    def gate() -> None:
        logits, given = make(rows), options(rows, **FILTERS[name])
        keys = torch.randint(-(2**63), 2**63 - 1, (rows,), device=DEVICE)
        tokens, finite = sample(logits, *given, keys)
        temperature, top_k, top_p, min_p = given
        near = torch.zeros_like(finite)
        # rounding may put the boundary of top_p within 1e-6 of where it is
        for step in (-1e-6, 0, 1e-6):
            moved = torch.where(top_p < 1, top_p.double() * (1 + step), 1.0)
            near |= cpu.sample(logits, temperature, top_k, moved, min_p, keys) == tokens
        assert bool(finite.all())
        assert bool(near.all())

    def calls() -> Calls:
        given = options(rows, **FILTERS[name])
        seeds = torch.randint(2**62, (rows,), device=DEVICE)
        return [lambda x=x: sample_seeded(x, *given, seeds, seeds) for x in inputs(make, rows)]

    def plain() -> Calls:
        given = options(rows, **FILTERS[name])
        keys = torch.randint(2**62, (rows,), device=DEVICE)
        return [lambda x=x: cpu.sample(x, *given, keys) for x in inputs(make, rows)[:4]]

    work = Work(nbytes=rows * VOCAB * 4)
    return Case(
        operator=f"sampler {name}",
        shape=f"{rows} x {VOCAB} fp32, {make.__name__}",
        work=work,
        calls=calls,
        gate=gate,
        goal_us=work.floor_us() + EXTRA_US[rows],
        plain=plain,
        plain_in_graph=False,
    )


def penalty_case(rows: int, length: int) -> Case:
    def given() -> list[torch.Tensor]:
        ids = torch.randint(VOCAB, (rows, length), device=DEVICE)
        lens = torch.full((rows,), length, device=DEVICE)
        return [ids, lens // 2, lens, *(torch.full((rows,), x, device=DEVICE) for x in (1.1, 0.5, 0.1))]

    def gate() -> None:
        logits, (ids, prompt, lens, *penalties) = flat(rows), given()
        expected = logits.clone()
        for row in range(rows):
            half = length // 2
            cpu.penalize(expected[row], ids[row, :half], ids[row, half:], *(x[row].item() for x in penalties))
        penalize_batch(logits, ids, prompt, lens, *penalties)
        assert torch.equal(logits, expected)

    def calls() -> Calls:
        counts = torch.zeros(rows, VOCAB, dtype=torch.int32, device=DEVICE)
        sets = [(x, given()) for x in inputs(flat, rows)]
        return [lambda x=x, g=g: penalize_batch(x, *g, counts=counts) for x, g in sets]

    # of each token its id, and its logit and count read and written
    work = Work(nbytes=rows * length * (8 + 8 + 8))
    return Case(
        operator="sampler penalties",
        shape=f"{rows} x {length} tokens of {VOCAB}",
        work=work,
        calls=calls,
        gate=gate,
    )


def logprobs_case(rows: int, num_top: int) -> Case:
    def gate() -> None:
        logits, ids = flat(rows), torch.randint(VOCAB, (rows,), device=DEVICE)
        found = token_logprobs(logits, ids, num_top)
        plain, truth = (cpu.token_logprobs(x, ids, num_top) for x in (logits, logits.double()))
        assert torch.equal(found[1], truth[1])
        assert torch.equal(found[2], truth[2])
        assert_as_good_as_plain(found[0], plain[0], truth[0])

    def calls() -> Calls:
        ids = torch.randint(VOCAB, (rows,), device=DEVICE)
        return [lambda x=x: token_logprobs(x, ids, num_top) for x in inputs(flat, rows)]

    return Case(
        operator=f"sampler logprobs, top {num_top}",
        shape=f"{rows} x {VOCAB} fp32",
        work=Work(nbytes=rows * VOCAB * 4),
        calls=calls,
        gate=gate,
    )


def cases() -> list[Case]:
    found = [greedy_case(rows) for rows in EXTRA_US]
    found += [
        sample_case(rows, name, make) for rows in EXTRA_US for name in FILTERS for make in (flat, peaked)
    ]
    found += [penalty_case(32, 4096), penalty_case(256, 2048)]
    return found + [logprobs_case(rows, top) for rows in (1, 32) for top in (0, 20)]


def warmups() -> list[Callable[[], object]]:
    """Everything a step of a model with this vocabulary may launch."""

    def both() -> object:
        logits, seeds = torch.randn(1, VOCAB, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        return sample_seeded(logits, *options(1, top_p=0.9), seeds, seeds)

    return [lambda: greedy(torch.randn(1, VOCAB, device=DEVICE)), both]
