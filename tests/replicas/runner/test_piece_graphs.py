"""A step run from mixer to mixer over padded, fixed memory gives what the model's own forward gives."""

import pytest
import torch

from hybridserve.parallel.group import SINGLE
from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.arena.layout import plan_arena
from hybridserve.replicas.engine.engine import Engine
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.registry import load_model
from hybridserve.replicas.runner.piece_graphs import PieceGraphs, plain_repeat
from hybridserve.replicas.runner.runner import ModelRunner
from hybridserve.replicas.runner.storage import ArenaStorage
from hybridserve.replicas.sampling_params import SamplingParams

CPU = torch.device("cpu")
PROMPTS = {f"r{n}": [(7 * n + i) % 500 for i in range(n)] for n in (1, 3, 40, 64, 150)}

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def parts(demo_model):
    config = load_model_config(demo_model)
    return config, load_model(demo_model, config, SINGLE, torch.float32, CPU)


def answers(parts, *, overlaps=False, pieces=False, sampling=None):
    """Output tokens of every prompt, all at once; and how many steps went through the pieces."""
    config, model = parts
    layout = plan_arena(config.mixers, 4, 16)
    storage = ArenaStorage(layout, 60, config.mixers, torch.float32, CPU)
    storage.buffer.fill_(0xFF)
    runner = ModelRunner(model, storage, CPU, max_num_seqs=8, overlaps=overlaps)
    used = 0
    if pieces:
        graphs = PieceGraphs(model.model, torch.float32, CPU, 300, plain_repeat)
        with torch.inference_mode():
            for memory in (graphs._projected, graphs._gates, graphs._met):
                memory.fill_(float("nan"))
            graphs.capture()
        inner = graphs.forward

        def counted(batch, caches):
            nonlocal used
            used += 1
            return inner(batch, caches)

        graphs.forward = counted
        runner._pieces = graphs
    engine = Engine(
        config,
        Arena(layout, 60),
        runner,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=128,
    )
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, sampling or GREEDY)
    tokens = {name: [] for name in PROMPTS}
    while engine.has_unfinished():
        for out in engine.step():
            tokens[out.request_id] += out.token_ids
    return tokens, used


def test_pieces_give_the_models_tokens(parts):
    expected, _ = answers(parts)
    got, used = answers(parts, pieces=True)
    assert used > 10
    assert got == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1, "min_tokens": 5},
    ],
)
def test_overlapping_steps_give_the_same_tokens(parts, params):
    """Also where the next draw counts the token that is pending."""
    sampling = SamplingParams(max_tokens=12, ignore_eos="min_tokens" not in params, **params)
    assert answers(parts, overlaps=True, sampling=sampling) == answers(parts, sampling=sampling)
