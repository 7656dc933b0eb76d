"""`shard_config`, and whole models on two gloo processes against the same models on one.

The file is also the program of the two processes: `python test_sharding.py RANK FOLDER`.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridserve.parallel.group import SINGLE, TensorParallelGroup, connect
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.registry import build_model, load_model
from hybridserve.replicas.models.sharding import shard_config, shard_mixer
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec

CPU = torch.device("cpu")
PROMPT = 30
# (layers, changes): heads that divide, a shared head that both ranks hold, groups that no rank holds whole
MODELS = {
    "even": ("lf", {"linear_num_key_heads": 2, "num_key_value_heads": 2, "attention_bias": True}),
    "replicated": ("lf", {"linear_num_key_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "experts": ("lf", {"kind": "qwen3_5_moe"}),
    "interleaved": ("lf", {"kind": "qwen3_next", "linear_num_key_heads": 1, "mlp_only_layers": [1]}),
    "unaligned": ("ll", {"linear_num_key_heads": 2, "linear_num_value_heads": 6}),
}


def logits(kit, folder: Path, group: TensorParallelGroup) -> torch.Tensor:
    """A prompt in two chunks and two decode steps."""
    config = load_model_config(folder)
    model = load_model(folder, config, group, torch.float32, CPU)
    caches = kit["Caches"](shard_config(config, group.rank, group.size), max_len=64)
    loaded = kit["Loaded"](model, caches)
    tokens = kit["random_tokens"](PROMPT + 2, config.vocab_size)
    rows = [loaded.run([(0, tokens[:11], 0)]), loaded.run([(0, tokens[11:PROMPT], 11)])]
    rows += [loaded.run([(0, [tokens[p]], p)], num_decodes=1) for p in (PROMPT, PROMPT + 1)]
    return torch.cat(rows)


def helpers() -> dict[str, object]:
    return runpy.run_path(str(Path(__file__).with_name("conftest.py")))


def test_two_ranks_equal_one(tmp_path) -> None:
    kit = helpers()
    for name, (layers, changes) in MODELS.items():
        kit["save_random_model"](tmp_path / name, layers, max_shard_size="8KB", **changes)
    command = [sys.executable, __file__]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for name in MODELS:
        expected = logits(kit, tmp_path / name, SINGLE)
        for rank in range(2):
            kit["assert_close"](torch.load(tmp_path / f"{name}-{rank}.pt"), expected, 1e-5)


def test_specs_of_a_shard() -> None:
    linear, full = LinearAttentionSpec(16, 48, 128, 128, 4), FullAttentionSpec(24, 4, 256, 64, 1e7)
    assert shard_mixer(linear, 1, 2) == LinearAttentionSpec(8, 24, 128, 128, 4)
    assert shard_mixer(full, 7, 8) == FullAttentionSpec(3, 1, 256, 64, 1e7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 8, "linear_num_key_heads": 8}, "num_attention_heads 4; .* is 4"),
        ({"num_attention_heads": 8}, "linear_num_value_heads 4; .* is 4"),
        (
            {"num_attention_heads": 8, "linear_num_value_heads": 8, "intermediate_size": 44},
            "intermediate_size 44",
        ),
    ],
)
def test_a_size_that_does_not_divide(demo_path, tmp_path, changes, message) -> None:
    values = json.loads((demo_path / "config.json").read_text())
    values.update(num_attention_heads=4, linear_num_value_heads=4, linear_num_key_heads=4)
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    group = TensorParallelGroup(0, 8, backend=connect_nobody())
    with pytest.raises(ValueError, match=f"tp_size 8 does not divide {message}"):
        build_model(load_model_config(tmp_path), group, torch.float32, CPU)


def connect_nobody() -> dist.ProcessGroupGloo:
    """A backend of one: building a model talks to no other rank."""
    from datetime import timedelta

    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    kit = helpers()
    group = connect(rank, 2, dist.FileStore(str(folder / "store"), 2))
    for name in MODELS:
        torch.save(logits(kit, folder / name, group), folder / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
