"""Which steps are run in two parts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridserve.parallel.layers.sums import two_parts
from hybridserve.replicas.engine.build import overlapped_bytes
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.placement import Placement
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.overlap import MIN_TOKENS, least_tokens

SHAPES = Path(__file__).parents[3] / "configs" / "models"
GPU = Placement(torch.device("cuda"), "bfloat16")


def test_experts_need_more_tokens() -> None:
    """In each part an expert has tokens enough to take longer than the reading of its weights."""
    assert least_tokens(load_model_config(SHAPES / "qwen3.5-9b.yaml")) == MIN_TOKENS
    moe = load_model_config(SHAPES / "qwen3.5-35b-a3b.yaml")
    # 256 experts, of which a token has 8
    assert least_tokens(moe) == 2 * 184 * 256 / 8
    many = replace(moe, moe=replace(moe.moe, top_k=128))
    assert least_tokens(many) == MIN_TOKENS


@pytest.mark.parametrize("tokens", [1, 2, 3, 511, 512, 2049, 4096, 4097, 8192])
def test_two_parts_are_all_rows(tokens: int) -> None:
    first, second = two_parts(tokens)
    assert (first.start, first.stop, second.stop) == (0, second.start, tokens)
    assert first.stop >= tokens - first.stop > (0 if tokens > 1 else -1)
    assert tokens < 512 or first.stop % 256 == 0


def test_memory_for_the_longest_part_alone() -> None:
    shape = str(SHAPES / "qwen3.5-9b.yaml")
    dense, moe = (load_model_config(SHAPES / f"{name}.yaml") for name in ("qwen3.5-9b", "qwen3.5-35b-a3b"))
    config = EngineConfig(shape, load_format="dummy")
    # 8,192 tokens of a step, by default
    assert overlapped_bytes(config, dense, GPU) == 4096 * 4096 * 2
    assert overlapped_bytes(replace(config, max_num_batched_tokens=4095), dense, GPU) == 0
    assert overlapped_bytes(config, moe, GPU) == 0
    assert overlapped_bytes(replace(config, max_num_batched_tokens=16384), moe, GPU) == 8192 * 2048 * 2
    assert overlapped_bytes(config, dense, Placement(torch.device("cpu"), "float32")) == 0
