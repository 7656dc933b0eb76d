"""An executor with a memory instead of a model: it notices every wrong page, unit, copy or position."""

import hashlib

import pytest

from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.arena.layout import plan_arena
from hybridserve.replicas.engine.engine import Engine
from hybridserve.replicas.engine.plan import PENDING, Sampled, StepResult
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec, ModelConfig

VOCAB = 50
MIXERS = {
    "hybrid": (LinearAttentionSpec(4, 8, 64, 64, 4), FullAttentionSpec(8, 1, 16, 16, 1e4)),
    "small pages": (LinearAttentionSpec(4, 4, 64, 64, 4), FullAttentionSpec(8, 1, 16, 16, 1e4)),
    "small units": (LinearAttentionSpec(1, 1, 8, 8, 2), FullAttentionSpec(4, 2, 32, 16, 1e4)),
    "linear only": (LinearAttentionSpec(4, 8, 64, 64, 4),),
    "full only": (FullAttentionSpec(4, 2, 32, 16, 1e4),),
}


def fold(state: str, tokens) -> str:
    for token in tokens:
        state = hashlib.blake2b(f"{state},{token}".encode(), digest_size=8).hexdigest()
    return state


def next_token(tokens) -> int:
    """The token the remembering executor answers after `tokens`."""
    return int(fold("", tokens), 16) % VOCAB


class RunningStep:
    """Ends when it is asked for its result, which is right once: as late as a GPU's could be."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        result, self._result = self._result, None
        assert result is not None, "a step was collected twice"
        return result


class RememberingExecutor:
    """Pages and units remember whose tokens they saw; both are checked before they are trusted."""

    def __init__(self, arena: Arena, overlaps: bool) -> None:
        self.layout = arena.layout
        self.overlaps = overlaps
        self.drawn: dict[str, int] = {}
        self.pages: dict[int, list] = {}
        self.units: dict[int, str] = {}
        self.poisoned: set[str] = set()
        self.plans = []

    def submit(self, plan) -> RunningStep:
        self.plans.append(plan)
        moved_pages = [(dst, list(self.pages[src])) for src, dst in plan.copies.pages]
        moved_units = [(dst, self.units[src]) for src, dst in plan.copies.units]
        self.pages.update(moved_pages)
        self.units.update(moved_units)
        assert all(len(s.token_ids) == 1 and s.context_len > 0 for s in plan.sequences[: plan.num_decodes])
        sampled = {}
        for sequence in plan.sequences:
            tokens = self._run(sequence)
            if sequence.sample is not None:
                known = list(sequence.sample.token_ids)
                pending = len(tokens) - len(known)
                assert known == tokens[: len(known)] and pending in ((0, 1) if self.overlaps else (0,))
                assert not pending or not sequence.sample.params.has_penalty
                assert sequence.sample.position == len(tokens)
                finite = sequence.request_id not in self.poisoned
                sampled[sequence.request_id] = Sampled(next_token(tokens), finite)
        self.drawn = {request_id: draw.token_id for request_id, draw in sampled.items()}
        return RunningStep(StepResult(sampled))

    def _run(self, sequence) -> list[int]:
        """Check the sequence's past, store its new tokens, and return all of them."""
        context = sequence.context_len
        new = [self.drawn[sequence.request_id] if t == PENDING else t for t in sequence.token_ids]
        tokens = []
        if self.layout.page.nbytes:
            size = self.layout.page.page_size
            assert len(sequence.block_table) * size >= context + len(new)
            for at, token in enumerate(new, start=context):
                page = self.pages.setdefault(sequence.block_table[at // size], [None] * size)
                page[at % size] = (sequence.request_id, at, token)
            for at in range(context + len(new)):
                owner, position, token = self.pages[sequence.block_table[at // size]][at % size]
                assert (owner, position) == (sequence.request_id, at), "a page holds another's tokens"
                tokens.append(token)
        if self.layout.unit_bytes:
            history = f"{sequence.request_id}:" if context == 0 else self.units[sequence.unit]
            self.units[sequence.unit] = f"{history}{','.join(map(str, new))},"
            owner, _, stored = self.units[sequence.unit].partition(":")
            assert owner == sequence.request_id, "a unit holds another's state"
            stored = [int(t) for t in stored.rstrip(",").split(",")]
            assert len(stored) == context + len(new)
            assert not tokens or stored == tokens
            tokens = stored
        return tokens


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"])
def make_engine(request):
    """A factory of engines on a RememberingExecutor; returns (engine, executor)."""
    overlaps = request.param

    def make(mix="hybrid", extents=8, budget=64, max_num_seqs=8, max_model_len=200, eos=()):
        layout = plan_arena(MIXERS[mix], 4, 16)
        arena = Arena(layout, extents)
        config = ModelConfig("fake", VOCAB, 8, 8, 1e-6, True, 10**6, "float32", MIXERS[mix], tuple(eos))
        executor = RememberingExecutor(arena, overlaps)
        engine = Engine(
            config,
            arena,
            executor,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
        )
        return engine, executor

    return make
