"""Shared fixtures: the demo model, random models saved by transformers, and caches laid out as an arena's."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hybridserve.parallel.group import SINGLE
from hybridserve.replicas.models.batch import KVCache, LayerCache, StateCache, StepBatch
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.qwen3_5 import Qwen3_5ForCausalLM
from hybridserve.replicas.models.registry import load_model
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec, ModelConfig

DEMO_MODEL = Path(__file__).parents[3] / "configs" / "demo-model"
CPU = torch.device("cpu")
ALIGN = 256


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def windows(
    region: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: int, offset: int
) -> torch.Tensor:
    """Rows of `shape` in a uint8 region, one every `stride` bytes from `offset` on, as many as fit."""
    item = dtype.itemsize
    row = torch.empty(shape, device="meta")
    count = (region.numel() - offset - row.numel() * item) // stride + 1
    flat = region.view(dtype)
    return flat.as_strided(
        (count, *shape), (stride // item, *row.stride()), flat.storage_offset() + offset // item
    )


class Caches:
    """A model's caches for some sequences in one buffer of 0xFF: shuffled pages first, then units.

    State rows are windows at every 256 bytes, so they overlap, as in the arena.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_sequences: int = 1,
        max_len: int = 256,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
    ) -> None:
        self.config, self.page_size, self.dtype = config, page_size, dtype
        full = [config.mixers[i] for i in config.full_layers]
        self.pages_each = -(-max_len // page_size)
        slab = page_size * full[0].total_num_kv_heads * full[0].head_dim * dtype.itemsize if full else 0
        pages_bytes = round_up(num_sequences * self.pages_each * 2 * len(full) * slab, ALIGN)
        offsets, self.unit = self._unit_layout()
        self.buffer = torch.full((pages_bytes + num_sequences * self.unit,), 0xFF, dtype=torch.uint8)
        pages, units = self.buffer[:pages_bytes], self.buffer[pages_bytes:]
        self.layers: list[LayerCache] = []
        for i, mixer in enumerate(config.mixers):
            if isinstance(mixer, FullAttentionSpec):
                self.layers.append(self._kv_cache(mixer, pages, slab, config.full_layers.index(i)))
            else:
                self.layers.append(self._state_cache(mixer, units, *offsets[i]))
        self.entries = [page * 2 * len(full) for page in range(num_sequences * self.pages_each)]
        random.Random(0).shuffle(self.entries)

    def _unit_layout(self) -> tuple[dict[int, tuple[int, int]], int]:
        """Byte offsets in a unit of each linear layer's recurrent and conv state, and the unit's size."""
        position, offsets = 0, {}
        for i in self.config.linear_layers:
            spec = self.config.mixers[i]
            recurrent = 4 * spec.total_num_v_heads * spec.head_v_dim * spec.head_k_dim
            conv = self.dtype.itemsize * spec.conv_kernel * (2 * spec.total_key_dim + spec.total_value_dim)
            offsets[i] = (position, position + round_up(recurrent, 4))
            position = round_up(offsets[i][1] + conv, 4)
        return offsets, round_up(position, ALIGN)

    def _kv_cache(self, spec: FullAttentionSpec, pages: torch.Tensor, slab: int, layer: int) -> KVCache:
        head = (spec.total_num_kv_heads, spec.head_dim)
        keys, values = (
            windows(pages, self.dtype, (self.page_size, *head), slab, (2 * layer + which) * slab)
            for which in (0, 1)
        )
        return KVCache(keys, values, keys.flatten(0, 1), values.flatten(0, 1))

    def _state_cache(
        self, spec: LinearAttentionSpec, units: torch.Tensor, recurrent: int, conv: int
    ) -> StateCache:
        channels = 2 * spec.total_key_dim + spec.total_value_dim
        state = (spec.total_num_v_heads, spec.head_v_dim, spec.head_k_dim)
        return StateCache(
            windows(units, torch.float32, state, ALIGN, recurrent),
            windows(units, self.dtype, (spec.conv_kernel, channels), ALIGN, conv),
        )

    def batch(self, work: Sequence[tuple[int, Sequence[int], int]], num_decodes: int = 0) -> StepBatch:
        """A step of (sequence, its tokens in this step, tokens before it) triples, decodes first."""
        tables = [self.entries[s * self.pages_each : (s + 1) * self.pages_each] for s, _, _ in work]
        positions = [list(range(context, context + len(tokens))) for _, tokens, context in work]
        slots = [
            table[p // self.page_size] * self.page_size + p % self.page_size
            for table, own in zip(tables, positions, strict=True)
            for p in own
        ]
        token_ids = torch.tensor([t for _, tokens, _ in work for t in tokens])
        return StepBatch(
            token_ids=token_ids,
            positions=torch.tensor([p for own in positions for p in own]),
            num_decodes=num_decodes,
            query_lens=tuple(len(tokens) for _, tokens, _ in work),
            context_lens=tuple(context for _, _, context in work),
            has_initial_state=torch.tensor([context > 0 for _, _, context in work]),
            state_indices=torch.tensor([s * self.unit // ALIGN for s, _, _ in work]),
            block_tables=torch.tensor(tables),
            slot_mapping=torch.tensor(slots),
            logits_indices=torch.arange(token_ids.shape[0]),
        )


@dataclass
class Loaded:
    """A model, and one set of caches for it."""

    model: Qwen3_5ForCausalLM
    caches: Caches

    @torch.inference_mode()
    def run(self, work: Sequence[tuple[int, Sequence[int], int]], num_decodes: int = 0) -> torch.Tensor:
        """fp32 logits of every token of the step, [T, vocab]."""
        hidden = self.model(self.caches.batch(work, num_decodes), self.caches.layers)
        return self.model.vocabulary.gather(self.model.compute_logits(hidden))


def load(path: Path, *, dtype: torch.dtype = torch.float32, **cache_options: int) -> Loaded:
    """Our model of the folder, with caches of NaN."""
    config = load_model_config(path)
    model = load_model(path, config, SINGLE, dtype, CPU)
    return Loaded(model, Caches(config, dtype=dtype, **cache_options))


TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
TINY_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
# what transformers calls the classes of a kind of model: its config, its causal language model
CLASSES = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
}
MIXERS = {"l": "linear_attention", "f": "full_attention"}


def save_random_model(
    folder: Path,
    layers: str,
    *,
    kind: str = "qwen3_5",
    seed: int = 0,
    max_shard_size: str = "1GB",
    **changes: object,
):
    """A random transformers model of one mixer a letter (l, f), saved to `folder`; returns it in fp32."""
    import transformers

    make_config, make_model = (getattr(transformers, name) for name in CLASSES[kind])
    torch.manual_seed(seed)
    values = {
        **TINY,
        **(TINY_MOE if kind != "qwen3_5" else {}),
        "num_hidden_layers": len(layers),
        "layer_types": [MIXERS[letter] for letter in layers],
    }
    reference = make_model(make_config(**{**values, **changes})).float().eval()
    with torch.no_grad():
        # transformers starts norms at the identity and dt_bias at one, which would hide an exchanged weight
        for name, parameter in reference.named_parameters():
            if "norm" in name or "dt_bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "A_log" not in name:
                parameter.mul_(4.0)
    reference.save_pretrained(folder, max_shard_size=max_shard_size)
    return reference


@torch.inference_mode()
def reference_logits(reference: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits of every position, [T, vocab]."""
    return reference(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Maximum absolute difference at most `tolerance` of the largest |logit|."""
    limit = tolerance * theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item()
    assert difference <= limit, f"differ by {difference:.3g}, allowed {limit:.3g}"


@dataclass(frozen=True)
class Kit:
    """The helpers above, for test modules (which cannot import each other)."""

    load: Callable[..., Loaded] = staticmethod(load)
    save_random_model: Callable[..., torch.nn.Module] = staticmethod(save_random_model)
    reference_logits: Callable[..., torch.Tensor] = staticmethod(reference_logits)
    random_tokens: Callable[..., list[int]] = staticmethod(random_tokens)
    assert_close: Callable[..., None] = staticmethod(assert_close)
    caches: type[Caches] = Caches
    loaded: type[Loaded] = Loaded


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_path() -> Path:
    return DEMO_MODEL


@pytest.fixture(scope="session")
def demo_reference() -> torch.nn.Module:
    """The demo model as transformers loads it, fp32."""
    from transformers import Qwen3_5ForCausalLM as Reference

    return Reference.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
