"""What every rank computes for `test_sampling_on_ranks.py`: draws from its part of made-up logits."""

from dataclasses import astuple

import torch

from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.vocabulary import VocabularyShard
from hybridserve.replicas.engine.plan import SampleSpec
from hybridserve.replicas.runner.draws import FetchedDraws
from hybridserve.replicas.runner.sampling import Sampler, has_filters
from hybridserve.replicas.sampling_params import SamplingParams

CPU = torch.device("cpu")
# options of a request, in turn over the rows
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 40, "logprobs": 3},
    {"top_p": 0.9},
    {"top_p": 0.3, "min_p": 0.02},
    {"min_p": 0.1, "temperature": 2.0},
    {"top_k": 1500, "top_p": 0.95},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.3, "top_p": 0.999},
    {"temperature": 0.0, "repetition_penalty": 3.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.8, "top_k": 12, "frequency_penalty": 1.9, "logprobs": 6},
    {"temperature": 0.0, "logit_bias": True, "logprobs": 2},
    {"temperature": 1.5, "logit_bias": True, "top_p": 0.8},
    {"temperature": 0.0, "banned": True, "logprobs": 2},
]


def make_logits(rows: int, vocab: int, *, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    """With many equal logits, so that ties lie on different ranks."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * scale * 4).round() / 4


def make_specs(logits: torch.Tensor) -> list[SampleSpec]:
    rows, vocab = logits.shape
    best = logits.topk(8).indices
    specs = []
    for row in range(rows):
        options = dict(FILTERS[row % len(FILTERS)])
        banned = tuple(best[row, :3].tolist()) if options.pop("banned", False) else ()
        if options.get("logit_bias"):
            # the first and last ids of all, and good ones, wherever they are
            options["logit_bias"] = {0: 9.0, vocab - 1: 9.5, **dict.fromkeys(best[row, :2].tolist(), -20.0)}
        token_ids = [*best[row].tolist(), 0, vocab - 1, int(best[row, 0])]
        specs.append(SampleSpec(SamplingParams(**options), 100 + row, row, 4, token_ids, banned))
    return specs


def draw(
    group: TensorParallelGroup, vocab: int, rows: int, *, filters: bool = True, **options: float
) -> tuple[list[tuple], int]:
    """Every row's (token, finite, logprobs or None), and how many rows were gathered."""
    logits = make_logits(rows, vocab, **options)
    specs = make_specs(logits)
    if not filters:
        kept = [row for row, spec in enumerate(specs) if not has_filters(spec)]
        logits, specs = logits[kept], [specs[row] for row in kept]
    vocabulary = VocabularyShard(vocab, group)
    own = logits[:, vocabulary.start : vocabulary.end].clone()
    drawn = FetchedDraws(Sampler(CPU, vocabulary).draw(own, specs), specs).sampled()
    found = [(d.token_id, d.finite, d.logprobs and astuple(d.logprobs)) for d in drawn]
    return found, vocabulary.num_gathered_rows


def draw_poisoned(group: TensorParallelGroup, vocab: int, column: int) -> list[tuple[int, bool]]:
    """(token, finite) of rows of which number 1 and 4 have a NaN or infinity in `column`."""
    logits = make_logits(6, vocab)
    logits[1, column], logits[4, column] = float("nan"), float("inf")
    specs = make_specs(make_logits(6, vocab))
    vocabulary = VocabularyShard(vocab, group)
    own = logits[:, vocabulary.start : vocabulary.end].clone()
    drawn = FetchedDraws(Sampler(CPU, vocabulary).draw(own, specs), specs).sampled()
    return [(d.token_id, d.finite) for d in drawn]


def logprobs_of(group: TensorParallelGroup, vocab: int, num_top: int) -> list[tuple]:
    """Of given tokens, the first and last id among them."""
    logits = make_logits(4, vocab)
    vocabulary = VocabularyShard(vocab, group)
    own = logits[:, vocabulary.start : vocabulary.end]
    found = Sampler(CPU, vocabulary).logprobs_of(own, [0, vocab // 2, vocab - 1, 5], num_top)
    return [astuple(f) for f in found]
