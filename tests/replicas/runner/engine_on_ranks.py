"""What every rank of a group computes for `test_engine_on_ranks.py`: an engine of its own beside the others'.

Engines that are given the same requests plan the same steps, as long as all ranks draw the same tokens.
"""

from dataclasses import astuple

import torch

from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.arena.layout import plan_arena
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.engine import Engine
from hybridserve.replicas.models.registry import load_model
from hybridserve.replicas.models.sharding import shard_config
from hybridserve.replicas.runner.runner import ModelRunner
from hybridserve.replicas.runner.storage import ArenaStorage
from hybridserve.replicas.sampling_params import SamplingParams

CPU = torch.device("cpu")
REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 9},
    {"temperature": 0.7, "seed": 3, "min_p": 0.05, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2, "logit_bias": {7: 4.0, 8000: 4.0}},
]


def answers(group: TensorParallelGroup, folder: str, split: str, num_extents: int) -> tuple[list[tuple], int]:
    """(tokens, logprobs, prompt logprobs) of every request, and how often any was preempted."""
    model_config = EngineConfig(folder, linear_attention_split=split).read_model_config()
    model = load_model(folder, model_config, group, torch.float32, CPU)
    mixers = shard_config(model_config, group.rank, group.size).mixers
    layout = plan_arena(mixers, 4, 4)
    storage = ArenaStorage(layout, num_extents, mixers, torch.float32, CPU)
    storage.buffer.fill_(0xFF)
    engine = Engine(
        model_config,
        Arena(layout, num_extents),
        ModelRunner(model, storage, CPU, max_num_seqs=8),
        max_model_len=200,
        max_num_seqs=8,
        max_num_batched_tokens=48,
    )
    for number, options in enumerate(REQUESTS):
        prompt = [(31 * number + 7 * i) % 8000 for i in range(78 + number)]
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=14, ignore_eos=True, **options))
    found: list[tuple[list, list, list]] = [([], [], []) for _ in REQUESTS]
    preemptions = dict.fromkeys(range(len(REQUESTS)), 0)
    while engine.has_unfinished():
        for out in engine.step():
            assert out.error is None, out.error
            number = int(out.request_id)
            tokens, logprobs, prompt_logprobs = found[number]
            tokens += out.token_ids
            logprobs += map(astuple, out.logprobs)
            prompt_logprobs += [(token, *astuple(own)) for token, own in out.prompt_logprobs]
            preemptions[number] = out.num_preemptions
    return found, sum(preemptions.values())
