"""`load_model_config`, `parse_model_config` and `load_generation_defaults`."""

import json
import subprocess
import sys

import pytest

from hybridserve.replicas.models.config import (
    PARSERS,
    load_generation_defaults,
    load_model_config,
    override,
    parse_model_config,
)
from hybridserve.replicas.models.registry import BUILDERS
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec

TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    "dtype": "bfloat16",
}
LINEAR = LinearAttentionSpec(2, 4, 8, 12, 4)
FULL = FullAttentionSpec(4, 2, 16, 8, 1e5)


def changed(**changes: object) -> dict[str, object]:
    """TEXT with keys replaced; None removes one."""
    return {key: value for key, value in {**TEXT, **changes}.items() if value is not None}


def parse(values: dict[str, object], names: tuple[str, ...] = ()):
    return parse_model_config(values, "config.json", names)


def layer_names(layers: str, prefix: str = "model.") -> tuple[str, ...]:
    modules = {"l": "linear_attn.A_log", "f": "self_attn.q_proj.weight"}
    own = [f"{prefix}layers.{i}.{modules[letter]}" for i, letter in enumerate(layers)]
    return (f"{prefix}embed_tokens.weight", *own)


def test_demo_model(demo_path) -> None:
    config = load_model_config(demo_path)
    assert config.mixers == 2 * (
        *3 * (LinearAttentionSpec(4, 8, 64, 64, 4),),
        FullAttentionSpec(8, 2, 64, 16, 100000.0),
    )
    assert config.linear_layers == (0, 1, 2, 4, 5, 6) and config.full_layers == (3, 7)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (8192, 320, 960)
    assert config.tie_word_embeddings and config.dtype == "bfloat16" and config.eos_token_ids == (0, 2)
    assert config.weights_prefix == "model." and config.max_position_embeddings == 8192


def test_wrapped_text_config() -> None:
    wrapped = {"model_type": "qwen3_5", "text_config": TEXT, "vision_config": {}, "eos_token_id": 7}
    config = parse(wrapped)
    assert config.model_type == "qwen3_5_text" and config.mixers == (LINEAR, FULL, LINEAR, FULL)
    assert config.weights_prefix == "model.language_model." and config.eos_token_ids == (7,)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_text"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_the_names_decide_the_prefix(model_type, prefix) -> None:
    values = {**TEXT, "model_type": model_type, "text_config": TEXT}
    names = (*layer_names("lflf", prefix), "model.visual.patch_embed.weight", "mtp.layers.0.self_attn.x")
    assert parse(values, names).weights_prefix == prefix


def test_layer_types_from_each_source() -> None:
    listed = ["full_attention", "linear_attention"]
    assert parse(changed(layer_types=listed, num_hidden_layers=2)).mixers == (FULL, LINEAR)
    assert parse(changed(full_attention_interval=4)).mixers == (LINEAR, LINEAR, LINEAR, FULL)
    names = (*layer_names("ffl"), "mtp.layers.0.linear_attn.A_log")
    inferred = parse(changed(full_attention_interval=None, num_hidden_layers=3), names)
    assert inferred.mixers == (FULL, FULL, LINEAR)


def test_keys_of_an_absent_mixer_are_not_asked_for() -> None:
    no_linear = {key: None for key in TEXT if key.startswith("linear_")}
    assert set(parse(changed(full_attention_interval=1, **no_linear)).mixers) == {FULL}
    no_full = dict.fromkeys(("num_attention_heads", "head_dim", "rope_parameters"))
    assert set(parse(changed(full_attention_interval=9, **no_full)).mixers) == {LINEAR}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e5, "partial_rotary_factor": 0.5},
        {"rope_theta": 1e5, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "mrope"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}},
        {"rope_theta": 3, "rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.5}},
        {
            "rope_parameters": {
                "rope_type": "mrope",
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            }
        },
    ],
)
def test_old_and_new_rope_keys(rope) -> None:
    assert parse(changed(**{"rope_parameters": None, **rope})).mixers[1] == FULL


def test_a_quarter_rotates_by_default() -> None:
    assert parse(changed(rope_parameters={"rope_theta": 1e5})).mixers[1].rotary_dim == 4


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"dtype": None}, "float32"),
    ],
)
def test_dtype_keys(keys, dtype) -> None:
    assert parse(changed(**keys)).dtype == dtype


@pytest.mark.parametrize(
    ("says", "has_head", "tied"),
    [
        (True, True, True),
        (True, False, True),
        (False, True, False),
        (False, False, True),
        (None, True, False),
    ],
)
def test_tied_head_by_file_and_config(says, has_head, tied) -> None:
    names = layer_names("lflf") + (("lm_head.weight",) if has_head else ())
    assert parse(changed(tie_word_embeddings=says), names).tie_word_embeddings is tied


def test_without_weights_the_config_decides_about_the_head() -> None:
    assert not parse(changed(tie_word_embeddings=False)).tie_word_embeddings
    outer = {"model_type": "qwen3_5", "text_config": changed(tie_word_embeddings=None)}
    assert parse({**outer, "tie_word_embeddings": True}).tie_word_embeddings


@pytest.mark.parametrize("dim", [None, 16])
def test_end_tokens_of_both_files(tmp_path, dim) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(eos_token_id=5)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 5]}))
    assert load_model_config(tmp_path).eos_token_ids == (5, 6)


REFUSED = {
    "model_type": (
        {"model_type": "llama"},
        "model_type 'llama'.*supported: qwen3_5, qwen3_5_moe, .*qwen3_next",
    ),
    "no model_type": ({"model_type": None}, "lacks the key model_type"),
    "quantised": (
        {"quantization_config": {"quant_method": "fp8"}},
        r"quantization_config \(quant_method 'fp8'\)",
    ),
    "rope_type": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
    "old rope type": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type 'linear'"),
    "rope factor alone": ({"rope_scaling": {"factor": 2.0}}, r"factor 2\.0 in rope_scaling of"),
    "rope factor of the default": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "factor": 4}},
        "factor 4 in rope_parameters of",
    ),
    "rope_theta": ({"rope_parameters": {"rope_type": "default"}}, "lacks the key rope_theta"),
    "rope_theta value": ({"rope_parameters": {"rope_theta": -1.0}}, r"rope_theta .* got -1\.0"),
    "odd rotary dim": (
        {"rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.2}},
        "partial_rotary_factor 0.2 of head_dim 16",
    ),
    "missing": ({"hidden_size": None}, "lacks the key hidden_size"),
    "missing linear": ({"linear_key_head_dim": None}, "lacks the key linear_key_head_dim"),
    "missing head_dim": ({"head_dim": None}, "lacks the key head_dim"),
    "string": ({"vocab_size": "100"}, "vocab_size .* positive integer, got '100'"),
    "bool": ({"hidden_size": True}, "hidden_size .* got True"),
    "zero": ({"intermediate_size": 0}, "intermediate_size .* got 0"),
    "fraction": ({"num_hidden_layers": 4.0}, r"num_hidden_layers .* got 4\.0"),
    "eps": ({"rms_norm_eps": "small"}, "rms_norm_eps .* got 'small'"),
    "eps below zero": ({"rms_norm_eps": -1e-6}, "rms_norm_eps .* greater than 0, got -1e-06"),
    "eos beyond": ({"eos_token_id": [1, 100]}, "eos_token_id 100 .* vocab_size in config.json is 100"),
    "tie": ({"tie_word_embeddings": 1}, "tie_word_embeddings .* true or false, got 1"),
    "dtype": ({"dtype": "int8"}, "dtype .* got 'int8'"),
    "eos": ({"eos_token_id": "x"}, "eos_token_id .* got 'x'"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads 4 .* num_key_value_heads 3"),
    "linear heads": (
        {"linear_num_key_heads": 3},
        "linear_num_value_heads 4 .* linear_num_key_heads 3",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act .* 'silu', got 'gelu'"),
    "no gate": ({"attn_output_gate": False}, "attn_output_gate .* got False"),
    "layer_types length": (
        {"layer_types": ["full_attention"]},
        "layer_types .* has 1 entries, but num_hidden_layers is 4",
    ),
    "layer_types value": ({"layer_types": ["swa"] * 4}, "layer_types .* 'full_attention', got"),
    "no layer types": ({"full_attention_interval": None}, "lacks layer_types and full_attention_interval"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        parse(changed(**changes))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("lfl", "layer 3 name no mixer"),
        ("lflfl", "have a layer 4, but num_hidden_layers in config.json is 4"),
    ],
)
def test_layer_types_that_the_names_do_not_settle(layers, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse(changed(full_attention_interval=None), layer_names(layers))


def test_refused_wrappers() -> None:
    with pytest.raises(ValueError, match="lacks the key text_config"):
        parse({"model_type": "qwen3_5"})
    with pytest.raises(ValueError, match="model_type in text_config of config.json .* got 'qwen3_next'"):
        parse({"model_type": "qwen3_5", "text_config": changed(model_type="qwen3_next")})
    with pytest.raises(ValueError, match="quantization_config"):
        parse({"model_type": "qwen3_5", "text_config": TEXT, "quantization_config": {}})
    with pytest.raises(ValueError, match="rope_type 'yarn' in rope_scaling of config.json"):
        parse({"model_type": "qwen3_5", "text_config": TEXT, "rope_scaling": {"rope_type": "yarn"}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object, got list"),
        (b"\xff", "not valid JSON"),
    ],
)
def test_bad_config_files(tmp_path, content, message) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_model_config(tmp_path)


def test_missing_folder(tmp_path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_model_config(tmp_path / "nowhere")


def test_overrides(demo_path) -> None:
    config = load_model_config(
        demo_path, {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 5.0}}
    )
    assert config.max_position_embeddings == 64
    assert config.mixers[3].rope_theta == 5.0 and config.mixers[3].rotary_dim == 16
    wrapped = {"model_type": "qwen3_5", "text_config": {"vocab_size": 1, "hidden_size": 2}}
    assert override(wrapped, {"vocab_size": 3})["text_config"] == {"vocab_size": 3, "hidden_size": 2}
    assert override(wrapped, {"text_config": {"vocab_size": 3}})["text_config"]["hidden_size"] == 2
    assert override(wrapped, {"model_type": "x"})["model_type"] == "x"


def test_every_parser_leads_to_a_model() -> None:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    model_types = set()
    for name in PARSERS:
        text = {**TEXT, **experts, "model_type": f"{name.removesuffix('_text')}_text"}
        model_types.add(parse({**text, "model_type": name, "text_config": text}).model_type)
    assert model_types == set(BUILDERS)


def test_generation_defaults(tmp_path, demo_path) -> None:
    assert load_generation_defaults(demo_path) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "max_new_tokens": 256,
        "eos_token_id": (0, 2),
    }
    assert load_generation_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    values = {"do_sample": False, "temperature": 0.6, "top_k": 20, "min_p": 0.1, "top_p": None}
    file.write_text(json.dumps({**values, "repetition_penalty": 1.1}))
    assert load_generation_defaults(tmp_path) == {
        "temperature": 0.0,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    for values, message in (
        ({"temperature": "hot"}, "temperature .* got 'hot'"),
        ({"top_k": 1.5}, "top_k .* got 1.5"),
        ({"eos_token_id": [1, "b"]}, "eos_token_id"),
        ({"do_sample": "no"}, "do_sample"),
    ):
        file.write_text(json.dumps(values))
        with pytest.raises(ValueError, match=message):
            load_generation_defaults(tmp_path)


def test_config_does_not_import_torch() -> None:
    code = (
        "import sys; import hybridserve.replicas.models.config; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
