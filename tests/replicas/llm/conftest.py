from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs
from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.tokenizer import Tokenizer

END = 2


class ScriptedEngine:
    """Answers each prompt with ids known beforehand, one id a request a step."""

    def __init__(self, script: dict[tuple[int, ...], list[int]]) -> None:
        self.script = script
        self.requests: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self.given: dict[str, int] = {}
        self.aborted: list[str] = []
        self.steps = 0
        self.interrupt_at: int | None = None
        self.fail: str | None = None
        """A request that ends with an error at its second token."""

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        if not prompt_token_ids:
            raise ValueError("prompt is empty")
        assert params.n == 1
        self.requests[request_id] = (tuple(prompt_token_ids), params)
        self.given[request_id] = 0

    def abort(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[EngineOutput]:
        self.steps += 1
        if self.steps == self.interrupt_at:
            raise KeyboardInterrupt
        return [self._next(request_id) for request_id in list(self.requests)]

    def _next(self, request_id: str) -> EngineOutput:
        prompt, params = self.requests[request_id]
        index = self.given[request_id]
        if request_id == self.fail and index == 1:
            del self.requests[request_id]
            return EngineOutput(request_id, index, finish_reason="error", error="the logits held NaN")
        token_id = self.script[prompt][index]
        self.given[request_id] += 1
        reason = "stop" if token_id == END or token_id in params.stop_token_ids else None
        if reason is None and index + 1 == params.max_tokens:
            reason = "length"
        if reason is not None:
            del self.requests[request_id]
        row = TokenLogprobs(-0.5, 2, (7, token_id), (-0.25, -0.5))
        scored = tuple((i, row) for i in prompt[1:])
        return EngineOutput(
            request_id=request_id,
            first_index=index,
            token_ids=(token_id,),
            logprobs=(row,) if params.logprobs is not None else (),
            prompt_logprobs=scored if index == 0 and params.prompt_logprobs is not None else (),
            finish_reason=reason,
            stop_token_id=token_id if token_id in params.stop_token_ids else None,
            num_preemptions=1,
            first_scheduled_time=1.0,
        )


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.load(demo_model)


@pytest.fixture
def engine_for(tokenizer: Tokenizer) -> Callable[[dict[str, str]], ScriptedEngine]:
    """An engine that answers these texts with those texts and an end token."""

    def build(answers: dict[str, str]) -> ScriptedEngine:
        encode = tokenizer.encode
        return ScriptedEngine({tuple(encode(p)): [*encode(a), END] for p, a in answers.items()})

    return build
