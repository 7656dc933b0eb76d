"""Whole models on 2, 4 and 8 gloo processes against the same models on one, and what they send each other."""

import runpy
from pathlib import Path

import pytest
import torch

from hybridserve.parallel.group import SINGLE

PROGRAM = Path(__file__).with_name("model_on_ranks.py")
HEADS, CHANNELS = ("heads", "intermediate"), ("head_v_dim", "intermediate")
EXPERTS = ("heads", "experts")
# name: (layers, changes of the tiny config, [(tp_size, splits)])
CASES = {
    "all divides": (
        "lf",
        {"linear_num_key_heads": 4, "num_key_value_heads": 4, "attention_bias": True},
        [(2, HEADS), (4, HEADS), (2, CHANNELS)],
    ),
    # a key head and a KV head that all ranks hold
    "replicated": (
        "lf",
        {"linear_num_key_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True},
        [(2, HEADS), (4, HEADS), (4, CHANNELS)],
    ),
    # more ranks than key and KV heads
    "ratio 4": (
        "lf",
        {"linear_num_value_heads": 8, "num_attention_heads": 8},
        [(4, HEADS), (8, HEADS), (8, CHANNELS)],
    ),
    # more ranks than value heads: what is left cuts their channels
    "few value heads": (
        "lfl",
        {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "num_attention_heads": 8},
        [(2, HEADS), (4, HEADS), (8, HEADS)],
    ),
    # groups that no rank holds whole; 4 ranks are 2 groups of heads with half of the channels each
    "unaligned": ("ll", {"linear_num_value_heads": 6}, [(2, HEADS), (4, HEADS)]),
    "experts": ("lf", {"kind": "qwen3_5_moe"}, [(2, HEADS), (4, HEADS), (2, EXPERTS), (4, EXPERTS)]),
    "interleaved": (
        "lf",
        {"kind": "qwen3_next", "linear_num_key_heads": 1, "mlp_only_layers": [1]},
        [(2, HEADS), (2, ("head_v_dim", "experts")), (4, CHANNELS)],
    ),
}


@pytest.fixture(scope="module")
def program() -> dict[str, object]:
    return runpy.run_path(str(PROGRAM))


def check(
    on_ranks,
    program,
    kit,
    folder: Path,
    sizes: list[tuple[int, tuple[str, str]]],
    function: str = "generate",
) -> None:
    expected, tokens = program["generate"](SINGLE, str(folder))
    assert len({token for own in tokens for token in own}) > 3
    for tp_size, splits in sizes:
        ranks = on_ranks(tp_size, PROGRAM, function, folder=str(folder), splits=splits)
        for logits, found in ranks:
            assert found == tokens, (tp_size, splits)
            kit.assert_close(logits, expected, 1e-5)
            assert torch.equal(logits, ranks[0][0])


@pytest.mark.parametrize("name", CASES)
def test_random_models(on_ranks, program, kit, tmp_path, name) -> None:
    layers, changes, sizes = CASES[name]
    kit.save_random_model(tmp_path, layers, max_shard_size="8KB", **changes)
    check(on_ranks, program, kit, tmp_path, sizes)


def test_the_demo_model(on_ranks, program, kit, demo_path) -> None:
    check(on_ranks, program, kit, demo_path, [(2, HEADS), (4, CHANNELS), (8, HEADS)])


@pytest.mark.parametrize(("kind", "splits"), [("qwen3_5", CHANNELS), ("qwen3_5_moe", EXPERTS)])
def test_sums_that_norms_are_fused_with(on_ranks, program, kit, tmp_path, kind, splits) -> None:
    kit.save_random_model(tmp_path, "lf", kind=kind)
    check(on_ranks, program, kit, tmp_path, [(2, splits)], "generate_by_peers")


@pytest.mark.parametrize(
    ("kind", "splits", "function"),
    [
        ("qwen3_5", HEADS, "generate_in_parts"),
        ("qwen3_5", CHANNELS, "generate_by_exchange"),
        ("qwen3_5_moe", EXPERTS, "generate_in_parts"),
        ("qwen3_5_moe", HEADS, "generate_by_exchange"),
    ],
)
def test_steps_in_two_parts(on_ranks, program, kit, tmp_path, kind, splits, function) -> None:
    kit.save_random_model(tmp_path, "lfl", kind=kind, attention_bias=True)
    check(on_ranks, program, kit, tmp_path, [(2, splits)], function)


def test_stacked_experts_by_ranks(on_ranks, program, kit, tmp_path) -> None:
    """Experts as one tensor a layer, of which a rank reads its own."""
    kit.save_random_model(tmp_path, "l", kind="qwen3_5_moe")
    runpy.run_path(str(Path(__file__).with_name("test_moe.py")))["save_stacked"](tmp_path)
    check(on_ranks, program, kit, tmp_path, [(2, EXPERTS), (2, HEADS)])


@pytest.mark.parametrize(
    ("kind", "splits", "norm"),
    [
        ("qwen3_5", HEADS, []),
        # the norm's sums of squares, one number a head
        ("qwen3_5", CHANNELS, [4]),
        ("qwen3_5_moe", HEADS, []),
        ("qwen3_5_moe", EXPERTS, []),
    ],
)
def test_what_is_sent(on_ranks, kit, tmp_path, kind, splits, norm) -> None:
    """Of a linear layer and a token, one sum of the hidden vector, and one of the MLP: no state, ever."""
    kit.save_random_model(tmp_path, "ll", kind=kind)
    for prompt, decode in on_ranks(2, PROGRAM, "wire", folder=str(tmp_path), splits=splits):
        for num_tokens, calls in ((6, prompt), (2, decode)):
            hidden = ("all_reduce", (num_tokens, 32), torch.bfloat16)
            layer = [("all_reduce", (num_tokens, heads), torch.float32) for heads in norm]
            # of a draw, the best logit, its id, and whether all are finite
            embedding, draws = [hidden], [("all_gather", (1, 2, 3), torch.int32)]
            assert calls == embedding + 2 * [*layer, hidden, hidden] + draws
