"""What the keys of routed experts in a `config.json` mean. Torch-free."""

from collections.abc import Collection

from hybridserve.replicas.models.fields import Fields
from hybridserve.replicas.models.specs import MoESpec

MAX_EXPERTS = 1024
STACKED_NAME = ".mlp.experts.gate_up_proj"
SINGLE_NAME = ".mlp.experts.0.gate_proj.weight"


def parse_moe(
    text: Fields,
    tensor_names: Collection[str],
    *,
    stacked: bool,
    norm_topk_prob: bool = True,
    dense_layers: tuple[int, ...] = (),
) -> MoESpec:
    """The experts; `stacked` is how they are stored where there are no tensor names to tell.

    Raises:
        ValueError: a key is missing, ill-typed or unsupported; names it, its value and what is supported.
    """
    num_experts, top_k = text.positive("num_experts"), text.positive("num_experts_per_tok")
    if num_experts > MAX_EXPERTS:
        raise text.error("num_experts", f"at most {MAX_EXPERTS}")
    if top_k > num_experts:
        raise ValueError(
            f"num_experts_per_tok {top_k} in {text.where} is more than num_experts {num_experts}"
        )
    size = text.positive("moe_intermediate_size")
    shared = text.positive("shared_expert_intermediate_size")
    if shared != size:
        raise ValueError(
            f"shared_expert_intermediate_size {shared} in {text.where} is not supported; supported: that of "
            f"an expert, moe_intermediate_size {size}"
        )
    return MoESpec(
        num_experts=num_experts,
        top_k=top_k,
        total_intermediate_size=size,
        norm_topk_prob=norm_topk_prob,
        stacked=_stacked(tensor_names, stacked),
        dense_layers=dense_layers,
    )


def _stacked(tensor_names: Collection[str], default: bool) -> bool:
    """Tools save both forms of either model, so the names decide where there are any."""
    if any(name.endswith(STACKED_NAME) for name in tensor_names):
        return True
    return default and not any(name.endswith(SINGLE_NAME) for name in tensor_names)
