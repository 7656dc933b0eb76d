"""Costs of a step against figures worked out by hand, and its messages."""

from pathlib import Path

import pytest

from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.models.step_cost import Message, step_cost


@pytest.fixture
def model(repo_root: Path):
    return lambda name: load_model_config(repo_root / "configs" / "models" / f"{name}.yaml")


def floor_ms(config: ModelConfig, sequences: int, tokens: int, context: int) -> float:
    """Each byte once at 4.3 TB/s, each operation of a product once at 790 TFLOP/s."""
    cost = step_cost(config, sequences=sequences, tokens=tokens, context=context, tp_size=1)
    products = max(cost.weight_bytes / 4.3e12, cost.product_flops / 790e12)
    mixers = max((cost.state_bytes + cost.kv_bytes) / 4.3e12, cost.mixer_flops / 790e12)
    return 1e3 * (products + mixers)


@pytest.mark.parametrize(
    ("name", "sequences", "tokens", "context", "ms"),
    [
        ("qwen3.5-9b", 1, 1, 576, 3.72),
        ("qwen3.5-9b", 8, 1, 576, 3.92),
        ("qwen3.5-9b", 32, 1, 576, 4.60),
        ("qwen3.5-9b", 256, 1, 576, 12.4),
        ("qwen3.5-9b", 1, 8192, 0, 151),
        ("qwen3.5-27b", 1, 1, 2048, 12.0),
        ("qwen3.5-27b", 32, 1, 2048, 15.2),
        ("qwen3.5-35b-a3b", 1, 1, 2048, 1.41),
        ("qwen3.5-35b-a3b", 32, 1, 2048, 11.7),
        ("qwen3.5-35b-a3b", 256, 1, 2048, 25.9),
    ],
)
def test_floors_of_one_gpu(model, name, sequences, tokens, context, ms) -> None:
    """The figures were worked out apart, from the models' shapes, before this code."""
    assert floor_ms(model(name), sequences, tokens, context) == pytest.approx(ms, rel=0.01)


def test_shards_share_everything_but_replicated_heads(model) -> None:
    config = model("qwen3.5-9b")
    one, two, eight = (step_cost(config, sequences=32, tokens=1, context=2048, tp_size=n) for n in (1, 2, 8))
    assert two.state_bytes == pytest.approx(one.state_bytes / 2, rel=0.01)
    assert two.product_flops == pytest.approx(one.product_flops / 2, rel=0.01)
    # four KV heads on eight shards: each is held twice
    assert eight.kv_bytes == one.kv_bytes / 4


def test_messages_of_a_step(model) -> None:
    config = model("qwen3.5-9b")
    cost = step_cost(config, sequences=32, tokens=1, context=0, tp_size=4)
    assert cost.messages == (
        Message("hidden", "all_reduce", 65, 32 * 4096 * 2),
        Message("sampling", "all_gather", 1, 32 * 4 * 12),
    )
    gathered = step_cost(config, sequences=32, tokens=1, context=0, tp_size=4, strategy="gather_state")
    assert gathered.messages[0].count == 65 - 24
    assert gathered.messages[2:] == (
        Message("projections", "all_gather", 24, 32 * 12352 * 2),
        Message("hidden", "all_gather", 24, 32 * 4096 * 2),
        Message("state", "all_gather", 24, 32 * 32 * 128 * 128 * 4),
    )
    assert gathered.state_bytes == pytest.approx(
        step_cost(config, sequences=32, tokens=1, context=0, tp_size=1).state_bytes, rel=0.01
    )
    assert step_cost(config, sequences=1, tokens=1, context=0, tp_size=1).messages == ()


def test_what_does_not_work_is_named(model) -> None:
    with pytest.raises(ValueError, match="strategy must be one of .*, got 'other'"):
        step_cost(model("qwen3.5-9b"), sequences=1, tokens=1, context=0, tp_size=2, strategy="other")
    with pytest.raises(ValueError, match="tp_size 3"):
        step_cost(model("qwen3.5-9b"), sequences=1, tokens=1, context=0, tp_size=3)
