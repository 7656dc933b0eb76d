"""Every option of EngineConfig out of its bounds is refused by name and value."""

import pytest

from hybridserve.replicas.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("state_dtype", "float16"),
        ("device", "tpu"),
        ("load_format", "pickle"),
        ("tensor_parallel_size", 0),
        ("linear_attention_split", "head_k_dim"),
        ("moe_split", "heads"),
        ("max_num_seqs", 0),
        ("max_num_seqs", "many"),
        ("max_num_batched_tokens", -1),
        ("page_size", 24),
        ("max_model_len", 0),
        ("cache_memory_bytes", 0),
        ("num_threads", 0),
        ("num_threads", 100_000),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", "most"),
        ("seed", "x"),
        ("hf_overrides", 5),
    ],
)
def test_a_bad_option_is_named_with_its_value(field, value):
    with pytest.raises(ValueError) as error:
        EngineConfig("model", **{field: value})
    assert field in str(error.value)
    assert str(value) in str(error.value)
