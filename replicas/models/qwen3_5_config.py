"""What the keys of a Qwen3.5 `config.json` mean. Torch-free.

Takes the text model's own config (`qwen3_5_text`) or the one of the vision-language wrapper (`qwen3_5`, whose
`text_config` it is). Refuses by name whatever would otherwise be run as something it is not. Qwen3.5-MoE and
Qwen3-Next share most keys, and `parse_family`.
"""

from collections.abc import Collection
from dataclasses import replace

from hybridserve.replicas.models.fields import Fields
from hybridserve.replicas.models.specs import (
    DTYPE_BYTES,
    FullAttentionSpec,
    LinearAttentionSpec,
    MixerSpec,
    ModelConfig,
    MoESpec,
)

PREFIXES = ("model.language_model.", "model.")
HEAD_NAME = "lm_head.weight"
LINEAR, FULL = "linear_attention", "full_attention"
DEFAULT_ROTARY_FACTOR = 0.25
# how a checkpoint's tensors tell a layer's mixer
MIXER_NAMES = {"linear_attn": LINEAR, "self_attn": FULL}


def parse_qwen3_5_text(
    fields: Fields, tensor_names: Collection[str], further_eos: tuple[int, ...]
) -> ModelConfig:
    """A text model's own config."""
    return parse_family("qwen3_5_text", fields, fields, tensor_names, further_eos)


def parse_qwen3_5(fields: Fields, tensor_names: Collection[str], further_eos: tuple[int, ...]) -> ModelConfig:
    """The text model inside a vision-language config."""
    return parse_family("qwen3_5_text", text_of(fields, "qwen3_5_text"), fields, tensor_names, further_eos)


def text_of(fields: Fields, model_type: str) -> Fields:
    """The `text_config` of a wrapper, which must be of `model_type`."""
    if not fields.has("text_config"):
        raise ValueError(f"{fields.where} lacks the key text_config")
    text = fields.object("text_config")
    if text.text("model_type", model_type) != model_type:
        raise text.error("model_type", repr(model_type))
    return text


def parse_family(
    model_type: str,
    text: Fields,
    outer: Fields,
    tensor_names: Collection[str],
    further_eos: tuple[int, ...],
    *,
    moe: MoESpec | None = None,
    interleaved: bool = False,
) -> ModelConfig:
    """The keys that all models of the family share; `outer` is the wrapper's config, or `text` itself.

    With `moe`, `intermediate_size` is read only if layers are dense. `interleaved`: see LinearAttentionSpec.
    """
    for fields in (text, outer):
        _refuse_unsupported(fields)
        _refuse_rope_scaling(fields)
    prefix = _weights_prefix(tensor_names, wrapped=text is not outer)
    types = _layer_types(text, tensor_names, prefix)
    mixers: dict[str, MixerSpec] = {}
    if FULL in types:
        mixers[FULL] = _full_attention(text)
    if LINEAR in types:
        mixers[LINEAR] = replace(_linear_attention(text), interleaved=interleaved)
    own_eos = text.token_ids("eos_token_id") or outer.token_ids("eos_token_id")
    vocab_size = text.positive("vocab_size")
    for token_id in own_eos + further_eos:
        if token_id >= vocab_size:
            raise ValueError(
                f"eos_token_id {token_id} is no token: vocab_size in {text.where} is {vocab_size}"
            )
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=text.positive("hidden_size"),
        intermediate_size=text.positive("intermediate_size") if moe is None or moe.dense_layers else 0,
        rms_norm_eps=_eps(text),
        tie_word_embeddings=_tied(text, outer, tensor_names),
        max_position_embeddings=text.positive("max_position_embeddings"),
        dtype=_dtype(text, outer),
        mixers=tuple(mixers[kind] for kind in types),
        eos_token_ids=tuple(dict.fromkeys(own_eos + further_eos)),
        weights_prefix=prefix,
        moe=moe,
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.has("quantization_config"):
        method = fields.object("quantization_config").values.get("quant_method")
        raise ValueError(
            f"quantization_config (quant_method {method!r}) in {fields.where}: "
            "quantised checkpoints are not supported"
        )
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "'silu'")
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", "true")


def _refuse_rope_scaling(fields: Fields) -> None:
    """A factor stretches positions even where its type is left out; the wrapper may carry one too."""
    for rope in (fields.object("rope_parameters"), fields.object("rope_scaling")):
        for key in ("rope_type", "type"):
            if rope.has(key) and rope.text(key) not in ("default", "mrope"):
                raise ValueError(
                    f"{key} {rope.values[key]!r} in {rope.where} is not supported; supported: default, mrope"
                )
        if rope.has("factor") and rope.number("factor") != 1.0:
            raise ValueError(
                f"factor {rope.values['factor']!r} in {rope.where} is not supported: it scales the rope"
            )


def _weights_prefix(tensor_names: Collection[str], *, wrapped: bool) -> str:
    """Text-only fine-tunes keep the wrapper's prefix or drop it, so the names decide where there are any."""
    for prefix in PREFIXES:
        if any(name.startswith((f"{prefix}layers.", f"{prefix}embed_tokens.")) for name in tensor_names):
            return prefix
    return PREFIXES[0] if wrapped else PREFIXES[1]


def _tied(text: Fields, outer: Fields, tensor_names: Collection[str]) -> bool:
    """Tied if the config says so (a stored head is then a copy), and where the file has no head."""
    fields = outer if outer.has("tie_word_embeddings") else text
    tied = fields.flag("tie_word_embeddings", False)
    return tied or (len(tensor_names) > 0 and HEAD_NAME not in tensor_names)


def _eps(text: Fields) -> float:
    eps = text.number("rms_norm_eps")
    if eps <= 0.0:
        raise text.error("rms_norm_eps", "greater than 0")
    return eps


def _dtype(text: Fields, outer: Fields) -> str:
    """`dtype` or its old name `torch_dtype`; float32 where both are absent, as transformers has it."""
    for fields in (text, outer):
        for key in ("dtype", "torch_dtype"):
            if fields.has(key):
                name = fields.text(key).removeprefix("torch.")
                if name not in DTYPE_BYTES:
                    raise fields.error(key, f"one of {', '.join(DTYPE_BYTES)}")
                return name
    return "float32"


def _layer_types(text: Fields, tensor_names: Collection[str], prefix: str) -> tuple[str, ...]:
    """From `layer_types`, else `full_attention_interval`, else the names of the weights."""
    num_layers = text.positive("num_hidden_layers")
    if text.has("layer_types"):
        types = text.values["layer_types"]
        if not isinstance(types, list) or any(kind not in (LINEAR, FULL) for kind in types):
            raise text.error("layer_types", f"a list of {LINEAR!r} and {FULL!r}")
        if len(types) != num_layers:
            raise ValueError(
                f"layer_types in {text.where} has {len(types)} entries, but num_hidden_layers is {num_layers}"
            )
        return tuple(types)
    if text.has("full_attention_interval"):
        interval = text.positive("full_attention_interval")
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    if tensor_names:
        return _inferred_types(text, tensor_names, prefix, num_layers)
    raise ValueError(
        f"{text.where} lacks layer_types and full_attention_interval, "
        "and there are no weights to infer them from"
    )


def _inferred_types(
    text: Fields, tensor_names: Collection[str], prefix: str, num_layers: int
) -> tuple[str, ...]:
    found: dict[int, set[str]] = {i: set() for i in range(num_layers)}
    for name in tensor_names:
        parts = name.removeprefix(f"{prefix}layers.").split(".")
        if len(parts) > 1 and parts[0].isdecimal() and parts[1] in MIXER_NAMES:
            found.setdefault(int(parts[0]), set()).add(MIXER_NAMES[parts[1]])
    for layer, kinds in found.items():
        if layer >= num_layers:
            raise ValueError(
                f"the weights have a layer {layer}, but num_hidden_layers in {text.where} is {num_layers}"
            )
        if len(kinds) != 1:
            raise ValueError(
                f"{text.where} lacks layer_types, and the weights of layer {layer} "
                f"name {' and '.join(sorted(kinds)) or 'no mixer'}"
            )
    return tuple(found[i].pop() for i in range(num_layers))


def _divides(fields: Fields, heads: str, shared: str) -> tuple[int, int]:
    total, groups = fields.positive(heads), fields.positive(shared)
    if total % groups:
        raise ValueError(f"{heads} {total} in {fields.where} is not a multiple of {shared} {groups}")
    return total, groups


def _full_attention(text: Fields) -> FullAttentionSpec:
    num_heads, num_kv_heads = _divides(text, "num_attention_heads", "num_key_value_heads")
    head_dim = text.positive("head_dim")
    theta, factor = _rope(text)
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"partial_rotary_factor {factor} of head_dim {head_dim} in {text.where} rotates {rotary_dim} "
            "dims, which must be even and within the head"
        )
    return FullAttentionSpec(
        total_num_heads=num_heads,
        total_num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        bias=text.flag("attention_bias", False),
    )


def _rope(text: Fields) -> tuple[float, float]:
    """(theta, partial rotary factor), from the new nested keys or the old ones.

    Text tokens have the same position in all sections of a multi-section rope, which is then plain rope.
    """
    rope = text.object("rope_parameters")
    old = text.object("rope_scaling")
    theta = next((f for f in (rope, old, text) if f.has("rope_theta")), text).number("rope_theta")
    if theta <= 1.0:
        raise ValueError(f"rope_theta in {text.where} must be greater than 1, got {theta}")
    holder = next((f for f in (rope, old, text) if f.has("partial_rotary_factor")), text)
    return theta, holder.number("partial_rotary_factor", DEFAULT_ROTARY_FACTOR)


def _linear_attention(text: Fields) -> LinearAttentionSpec:
    num_v_heads, num_k_heads = _divides(text, "linear_num_value_heads", "linear_num_key_heads")
    kernel = text.positive("linear_conv_kernel_dim")
    return LinearAttentionSpec(
        total_num_k_heads=num_k_heads,
        total_num_v_heads=num_v_heads,
        head_k_dim=text.positive("linear_key_head_dim"),
        head_v_dim=text.positive("linear_value_head_dim"),
        conv_kernel=kernel,
    )
