"""What the keys of a Qwen3.5-MoE `config.json` mean: Qwen3.5 with experts in every layer. Torch-free."""

from collections.abc import Collection

from hybridserve.replicas.models.fields import Fields
from hybridserve.replicas.models.moe_config import parse_moe
from hybridserve.replicas.models.qwen3_5_config import parse_family, text_of
from hybridserve.replicas.models.specs import ModelConfig, MoESpec

MODEL_TYPE = "qwen3_5_moe_text"


def parse_qwen3_5_moe_text(
    fields: Fields, tensor_names: Collection[str], further_eos: tuple[int, ...]
) -> ModelConfig:
    """A text model's own config (`qwen3_5_moe_text`)."""
    moe = _moe(fields, tensor_names)
    return parse_family(MODEL_TYPE, fields, fields, tensor_names, further_eos, moe=moe)


def parse_qwen3_5_moe(
    fields: Fields, tensor_names: Collection[str], further_eos: tuple[int, ...]
) -> ModelConfig:
    """The text model inside a vision-language config (`qwen3_5_moe`)."""
    text = text_of(fields, MODEL_TYPE)
    moe = _moe(text, tensor_names)
    return parse_family(MODEL_TYPE, text, fields, tensor_names, further_eos, moe=moe)


def _moe(text: Fields, tensor_names: Collection[str]) -> MoESpec:
    # keys of relatives, which this architecture does not read: a value that changes nothing is let pass
    if not text.flag("norm_topk_prob", True):
        raise text.error("norm_topk_prob", "true")
    if text.has("mlp_only_layers") and text.values["mlp_only_layers"] != []:
        raise text.error("mlp_only_layers", "empty")
    if text.positive("decoder_sparse_step", 1) != 1:
        raise text.error("decoder_sparse_step", "1")
    return parse_moe(text, tensor_names, stacked=True)
