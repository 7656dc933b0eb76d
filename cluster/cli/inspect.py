"""`hybridserve inspect`: what a model is made of and how much of it fits in a GPU's memory.

Owns two tables. Reads `config.json` and the weights' names, never the weights, and imports no torch.
"""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hybridserve.cluster.sizes import format_size, parse_size
from hybridserve.replicas.engine.sizing import sequences_that_fit
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.footprint import Footprint, LayerFootprint, measure_footprint
from hybridserve.replicas.models.sharding import STATE_DTYPES, with_state_dtype
from hybridserve.replicas.models.specs import DTYPE_BYTES, LinearAttentionSpec, MixerSpec, ModelConfig

_CONTEXTS = (1024, 8192, 32768)


def inspect(
    model: Annotated[
        str, typer.Argument(help="Folder of a Hugging Face checkpoint, or a shape file.", show_default=False)
    ],
    memory: Annotated[str, typer.Option(help="Memory of one GPU, such as 80GiB or 500MB.")] = "80GiB",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; auto: as the checkpoint says.")
    ] = "auto",
    state_dtype: Annotated[
        str, typer.Option(help="Of recurrent states between steps: float32 or bfloat16.")
    ] = "float32",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size: all figures are one shard's.")] = 1,
) -> None:
    """Show a model's layers, their parameters and memory, and what fits in a GPU."""
    num_bytes = parse_size("memory", memory)
    config = load_model_config(model)
    dtype = config.dtype if dtype == "auto" else dtype
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of auto, {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    if state_dtype not in STATE_DTYPES:
        raise ValueError(f"state_dtype must be one of {', '.join(STATE_DTYPES)}, got {state_dtype!r}")
    footprint = measure_footprint(with_state_dtype(config, state_dtype), dtype, tp_size=tp)
    console = Console()
    shard = f", one of {tp} shards" if tp > 1 else ""
    console.print(f"{config.model_type}, {config.num_layers} layers, {dtype}{shard}")
    console.print(_layer_table(config, footprint))
    console.print(_memory_table(footprint, num_bytes, config.max_position_embeddings))


def _layer_table(config: ModelConfig, footprint: Footprint) -> Table:
    table = Table(show_footer=True)
    table.add_column("layer", "total", justify="right")
    table.add_column("mixer")
    table.add_column("heads")
    for name, total in (
        ("parameters", footprint.parameters),
        ("state B/seq", footprint.state_bytes),
        ("KV B/token", footprint.kv_bytes_per_token),
    ):
        # a narrow terminal folds words; a number it would cut
        table.add_column(name, f"{total:,}", justify="right", no_wrap=True)
    table.add_row("", "embedding", "", f"{footprint.embedding_parameters:,}")
    for index, layer in enumerate(footprint.layers):
        table.add_row(*_layer_row(index, layer))
    table.add_row("", "final norm", "", f"{footprint.final_norm_parameters:,}")
    head = "tied to the embedding" if config.tie_word_embeddings else ""
    table.add_row("", "head", head, f"{footprint.head_parameters:,}")
    return table


def _layer_row(index: int, layer: LayerFootprint) -> tuple[str, ...]:
    kind, heads = _describe_mixer(layer.mixer)
    state = f"{layer.state_bytes:,}" if layer.state_bytes else ""
    kv = f"{layer.kv_bytes_per_token:,}" if layer.kv_bytes_per_token else ""
    return str(index), kind, heads, f"{layer.parameters:,}", state, kv


def _describe_mixer(mixer: MixerSpec) -> tuple[str, str]:
    if isinstance(mixer, LinearAttentionSpec):
        key = f"{mixer.total_num_k_heads} k x {mixer.head_k_dim}"
        return "linear", f"{key}, {mixer.total_num_v_heads} v x {mixer.head_v_dim}"
    return "full", f"{mixer.total_num_heads} q, {mixer.total_num_kv_heads} kv x {mixer.head_dim}"


def _memory_table(footprint: Footprint, memory: int, max_context: int) -> Table:
    table = Table(
        title=f"in {format_size(memory)}, before workspace", title_justify="left", show_header=False
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_row("weights", format_size(footprint.weight_bytes))
    left = memory - footprint.weight_bytes
    if left < 0:
        table.add_row("missing for the weights", format_size(-left))
        return table
    layout = footprint.layout
    num_extents = left // layout.extent_bytes
    table.add_row(
        f"arena: {num_extents:,} extents of {format_size(layout.extent_bytes)}",
        format_size(num_extents * layout.extent_bytes),
    )
    for context in (*(c for c in _CONTEXTS if c < max_context), max_context):
        table.add_row(
            f"sequences of {context:,} tokens at once",
            f"{sequences_that_fit(layout, num_extents, context):,}",
        )
    return table
