"""One engine under measurement: prompts, timed calls, and steps one by one. Knows no workload."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.llm import LLM, SamplingParams

LARGEST_TOKEN = 200_000


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@dataclass
class Session:
    """`rng` draws the prompts; a row sets it."""

    llm: LLM
    device: torch.device
    rng: random.Random

    def __post_init__(self) -> None:
        self.engine = self.llm.engine
        self._ids = itertools.count()

    @property
    def batched_tokens(self) -> int:
        """Tokens of one step at most."""
        return self.engine._scheduler.limits.max_num_batched_tokens

    def prompt(self, length: int) -> list[int]:
        end = min(LARGEST_TOKEN, self.engine.model_config.vocab_size)
        return [self.rng.randrange(10, end) for _ in range(length)]

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [self.prompt(length) for _ in range(count)]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> float:
        """Seconds of one `LLM.generate`. Raises RuntimeError for an answer of another length than asked."""
        listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        self.wait()
        began = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], listed, use_tqdm=False)
        seconds = time.perf_counter() - began
        for index, (output, one) in enumerate(zip(outputs, listed, strict=True)):
            answer = output.outputs[0]
            if answer.finish_reason != "length" or len(answer.token_ids) != one.max_tokens:
                raise RuntimeError(
                    f"answer {index} of {len(prompts)} has {len(answer.token_ids)} tokens of "
                    f"{one.max_tokens} and ended with {answer.finish_reason!r}: {answer.stop_reason}"
                )
        return seconds

    def add(self, prompt: list[int], params: SamplingParams) -> str:
        """Queue a request at the engine itself; its id."""
        request_id = f"bench-{next(self._ids)}"
        self.engine.add_request(request_id, prompt, params)
        return request_id

    def step(self) -> list[EngineOutput]:
        """One step. Raises RuntimeError when a request ends with an error."""
        news = self.engine.step()
        for one in news:
            if one.finish_reason == "error":
                raise RuntimeError(f"{one.request_id} failed: {one.error}")
        return news

    def run_until_started(self, request_ids: Sequence[str]) -> None:
        """Step until each has a token."""
        missing = set(request_ids)
        while missing:
            missing -= {one.request_id for one in self.step() if one.token_ids}

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)
        # an overlapping engine still holds a step of theirs
        self.engine.step()

    def clear(self) -> None:
        """Abort all that is left."""
        self.abort(list(self.engine._requests))

    def step_times(self, count: int) -> list[float]:
        """Milliseconds of each of `count` steps: on a GPU between the ends of their work on the device."""
        if self.device.type != "cuda":
            return [self._timed(self.step) for _ in range(count)]
        ends = []
        for _ in range(count + 1):
            self.step()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
        torch.cuda.synchronize(self.device)
        return [first.elapsed_time(second) for first, second in itertools.pairwise(ends)]

    @staticmethod
    def _timed(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
