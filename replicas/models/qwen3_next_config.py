"""What the keys of a Qwen3-Next `config.json` mean: Qwen3.5's mixers, experts, dense layers. Torch-free."""

from collections.abc import Collection

from hybridserve.replicas.models.fields import Fields
from hybridserve.replicas.models.moe_config import parse_moe
from hybridserve.replicas.models.qwen3_5_config import parse_family
from hybridserve.replicas.models.specs import ModelConfig


def parse_qwen3_next(
    fields: Fields, tensor_names: Collection[str], further_eos: tuple[int, ...]
) -> ModelConfig:
    """A `qwen3_next` config. Input projections of linear layers are interleaved per key head."""
    num_layers = fields.positive("num_hidden_layers")
    dense = _dense_layers(fields, num_layers)
    moe = None
    if len(dense) < num_layers:
        moe = parse_moe(
            fields,
            tensor_names,
            stacked=False,
            norm_topk_prob=fields.flag("norm_topk_prob", True),
            dense_layers=dense,
        )
    return parse_family("qwen3_next", fields, fields, tensor_names, further_eos, moe=moe, interleaved=True)


def _dense_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    step = fields.positive("decoder_sparse_step", 1)
    named = fields.layers("mlp_only_layers")
    for layer in named:
        if layer >= num_layers:
            raise ValueError(
                f"mlp_only_layers in {fields.where} names layer {layer}, "
                f"but num_hidden_layers is {num_layers}"
            )
    return tuple(i for i in range(num_layers) if i in named or (i + 1) % step)
