"""What a YAML's args may say, and what is said about those that may not."""

import re
from pathlib import Path

import pytest

from hybridserve.cluster.settings import AppSettings
from hybridserve.cluster.settings_reading import in_settings_words, load_settings
from hybridserve.cluster.settings_sections import PoolSettings


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    return "models/tiny"


def test_defaults_and_the_engines_config(model: str, tmp_path: Path) -> None:
    settings = load_settings({"model": {"path": model}, "serving": {"cache_memory": "512MiB"}}, tmp_path)
    assert settings.model.path == str(tmp_path / "models" / "tiny")
    assert settings.model.served_name == "tiny"
    engine = settings.engine_config("cpu")
    assert engine.model == settings.model.path
    assert engine.cache_memory_bytes == 512 * 2**20
    assert engine.max_num_seqs == settings.serving.max_batch_size
    assert engine.device == "cpu"


def test_every_word_reaches_the_engine(model: str, tmp_path: Path) -> None:
    args = {
        "model": {
            "path": model,
            "name": "mine",
            "precision": "bfloat16",
            "state_precision": "bfloat16",
            "max_context_length": 4096,
            "load_format": "dummy",
        },
        "parallel": {"tensor_parallel_size": 4, "pipeline_parallel_size": 1},
        "serving": {
            "max_batch_size": 7,
            "max_num_batched_tokens": 99,
            "gpu_memory_utilization": 0.5,
            "page_size": 32,
            "num_threads": 3,
        },
    }
    settings = load_settings(args, tmp_path)
    engine = settings.engine_config("cuda")
    assert settings.model.served_name == "mine"
    assert (engine.dtype, engine.max_model_len, engine.load_format) == ("bfloat16", 4096, "dummy")
    assert engine.state_dtype == "bfloat16"
    assert (engine.tensor_parallel_size, engine.device) == (4, "cuda")
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.page_size) == (7, 99, 32)
    assert (engine.gpu_memory_utilization, engine.num_threads) == (0.5, 3)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "model is missing"),
        ({"model": {}}, "model.path is missing"),
        ({"model": {"path": "x"}, "modle": {}}, "unknown key modle"),
        ({"model": {"path": "x", "presicion": "auto"}}, "unknown key model.presicion"),
        ({"model": {"path": "x", "precision": "int8"}}, "model.precision: .*got 'int8'"),
        ({"model": {"path": "x", "state_precision": "auto"}}, "model.state_precision: .*got 'auto'"),
        ({"model": {"path": "x", "max_context_length": 0}}, "model.max_context_length: .*got 0"),
        ({"model": {"path": "x"}, "serving": {"max_batch_size": "8"}}, "serving.max_batch_size: .*got '8'"),
        ({"model": {"path": "x"}, "serving": {"cache_memory": "many"}}, "serving.cache_memory: .*got 'many'"),
        ({"model": {"path": "x"}, "serving": {"cache_memory": "0MB"}}, "serving.cache_memory: .*got '0MB'"),
        (
            {"model": {"path": "x"}, "parallel": {"pipeline_parallel_size": 2}},
            r"parallel.pipeline_parallel_size: must be 1 \(.*\), got 2",
        ),
        ({"model": "x"}, "model: .*got 'x'"),
        (["model"], "args must be a mapping of keys to values, got .'model'."),
        (None, "args must be a mapping of keys to values, got None"),
        ({"model": {"path": "nowhere"}}, "model.path 'nowhere': there is no /.*/nowhere/config.json"),
    ],
)
def test_errors_name_the_key_and_the_value(args: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_settings(args, tmp_path)


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown key a; .*unknown key b"):
        load_settings({"model": {"path": "x"}, "a": 1, "b": 2}, tmp_path)


@pytest.mark.parametrize(("written", "size"), [("2 GB", 2 * 10**9), ("1.5kib", 1536), (77, 77)])
def test_sizes_are_words_or_bytes(model: str, tmp_path: Path, written: object, size: int) -> None:
    args = {"model": {"path": model}, "ingress": {"max_body_bytes": written}}
    assert load_settings(args, tmp_path).ingress.max_body_bytes == size


def test_bounds_the_engine_checks_are_errors_too(model: str, tmp_path: Path) -> None:
    settings = load_settings({"model": {"path": model}, "serving": {"page_size": 24}}, tmp_path)
    assert isinstance(settings, AppSettings)
    with pytest.raises(ValueError, match="page_size must be a power of two, got 24"):
        settings.engine_config("cpu")


def test_the_readme_lists_every_setting(repo_root: Path) -> None:
    table = re.findall(r"^\| (`[^|]+`) \|", (repo_root / "README.md").read_text(), re.MULTILINE)
    listed = set()
    for cell in table:
        section = ""
        for name in re.findall(r"`([\w.]+)`", cell):
            # a second key of a row leaves the section out
            section = name.partition(".")[0] or section
            listed.add(f"{section}.{name.rpartition('.')[2]}")
    settings = {
        f"{section}.{name}"
        for section, field in AppSettings.model_fields.items()
        # the pools are a list of sections
        for name in (PoolSettings if section == "pools" else field.annotation).model_fields
    }
    assert settings - listed == set()
    assert {key for key in listed if key.partition(".")[0] in AppSettings.model_fields} == settings


def test_an_engine_s_message_names_the_keys_of_the_yaml() -> None:
    said = in_settings_words("max_model_len is 9, but the arena of 7 bytes (cache_memory_bytes) holds 5")
    assert said == "model.max_context_length is 9, but the arena of 7 bytes (serving.cache_memory) holds 5"
    assert in_settings_words("head_dim is missing") == "head_dim is missing"


def test_a_shape_is_served_with_random_weights_and_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "shape-1.5b.yaml").write_text("model_type: qwen3_5_text")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    args = {"path": "shape-1.5b.yaml", "load_format": "dummy", "tokenizer": "words"}
    model = load_settings({"model": args}, tmp_path).model
    assert (model.served_name, model.path) == ("shape-1.5b", str(tmp_path / "shape-1.5b.yaml"))
    assert model.tokenizer_path == str(tmp_path / "words")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"tokenizer": "words"},
            "'shape.yaml' is a shape without weights: .*load_format to dummy.*got 'auto'",
        ),
        ({"load_format": "dummy"}, "'shape.yaml' is a shape, .*model.tokenizer must name a folder"),
        (
            {"load_format": "dummy", "tokenizer": "nowhere"},
            "model.tokenizer 'nowhere': there is no /.*/nowhere/tokenizer.json",
        ),
        ({"path": "notes.txt"}, "model.path 'notes.txt' is a file, and neither"),
    ],
)
def test_a_shape_that_cannot_be_served(args: dict[str, object], message: str, tmp_path: Path) -> None:
    for name in ("shape.yaml", "notes.txt"):
        (tmp_path / name).write_text("model_type: qwen3_5_text")
    with pytest.raises(ValueError, match=message):
        load_settings({"model": {"path": "shape.yaml", **args}}, tmp_path)


def test_another_tokenizer_than_the_checkpoint_s(model: str, tmp_path: Path) -> None:
    assert load_settings({"model": {"path": model}}, tmp_path).model.tokenizer_path == str(tmp_path / model)
    (tmp_path / "tokenizer.json").write_text("{}")
    settings = load_settings({"model": {"path": model, "tokenizer": "."}}, tmp_path)
    assert settings.model.tokenizer_path == str(tmp_path)


def pooled(tmp_path: Path, *pools: dict[str, object], **sections: object) -> AppSettings:
    (tmp_path / "config.json").write_text("{}")
    return load_settings({"model": {"path": "."}, "pools": list(pools), **sections}, tmp_path)


def test_without_pools_there_is_one_for_everything(model: str, tmp_path: Path) -> None:
    [spec] = load_settings({"model": {"path": model}}, tmp_path).pool_specs()
    assert (spec.name, spec.bucket, spec.replicas.min, spec.replicas.max) == ("pool", "0 and more", 1, 1)
    assert spec.limits.token_budget == 64 * 4096
    assert spec.borrows == ()


def test_pools_take_what_they_do_not_say_from_the_sections(tmp_path: Path) -> None:
    settings = pooled(
        tmp_path,
        {"name": "short", "max_prompt_tokens": 100, "serving": {"max_batch_size": 8, "cache_memory": "1MiB"}},
        {"name": "middle", "max_prompt_tokens": 200, "replicas": {"min": 0, "max": 3}, "borrows": []},
        {"name": "long", "tensor_parallel_size": 4, "replicas": 2},
        serving={"max_batch_size": 16, "token_budget": 5000, "page_size": 32},
        parallel={"tensor_parallel_size": 2},
    )
    specs = settings.pool_specs()
    assert [spec.bucket for spec in specs] == ["0-100", "101-200", "201 and more"]
    assert [spec.tensor_parallel_size for spec in specs] == [2, 2, 4]
    assert [(spec.replicas.min, spec.replicas.max) for spec in specs] == [(1, 1), (0, 3), (2, 2)]
    assert [spec.borrows for spec in specs] == [("middle", "long"), (), ()]
    engines = [settings.engine_config("cuda", spec) for spec in specs]
    assert [engine.max_num_seqs for engine in engines] == [8, 16, 16]
    assert [engine.cache_memory_bytes for engine in engines] == [2**20, None, None]
    assert [engine.tensor_parallel_size for engine in engines] == [2, 2, 4]
    assert {engine.page_size for engine in engines} == {32}
    assert {spec.limits.token_budget for spec in specs} == {5000}


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([{"name": "a", "max_prompt_tokens": 5}], r"pools\[0\] \(a\): .* left out in the last pool.* got 5"),
        ([{"name": "a"}, {"name": "b"}], r"pools\[0\] \(a\): max_prompt_tokens is missing"),
        (
            [{"name": "a", "max_prompt_tokens": 9}, {"name": "b", "max_prompt_tokens": 9}, {"name": "c"}],
            r"pools\[1\] \(b\): max_prompt_tokens must be more than the 9 of the pool before it, got 9",
        ),
        ([{"name": "a", "max_prompt_tokens": 9}, {"name": "a"}], r"name is taken by pools\[0\], got 'a'"),
        ([{"name": "Über"}], "pools.0.name: .*got 'Über'"),
        ([{"name": "a", "replicas": 0}], "pools.0.replicas.*got 0"),
        ([{"name": "a", "replicas": {"min": 3, "max": 2}}], "min must be at most max, got min 3 and max 2"),
        ([{"name": "a", "tensor_parallel_size": 0}], "pools.0.tensor_parallel_size: .*got 0"),
        ([{"name": "a", "bucket": 3}], "unknown key pools.0.bucket"),
        (
            [{"name": "a", "max_prompt_tokens": 9}, {"name": "b", "borrows": ["a"]}],
            r"pools\[1\] \(b\): borrows must name longer pools \(there are none\), got 'a'",
        ),
        ([{"name": "a", "serving": {"max_batch": 3}}], r"unknown key pools \(a\).serving.max_batch"),
        (
            [{"name": "a", "serving": {"page_size": "x"}}],
            r"pools \(a\).serving.page_size: .*got 'x'",
        ),
        ([{"name": "a", "serving": {"device": "cpu"}}], r"pools \(a\).serving.device: .*got 'cpu'"),
    ],
)
def test_pools_that_make_no_sense_are_named(
    tmp_path: Path, pools: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pooled(tmp_path, *pools)
