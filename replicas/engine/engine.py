"""The step loop's body: requests in, tokens out.

Owns the requests and their ends. Touches no tensor (the executor does) and no text (callers detokenise).
"""

import random
import time
from collections.abc import Sequence

from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.engine.executor import Executor
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput, Sampled, ScheduledSequence, StepResult
from hybridserve.replicas.engine.request import Request
from hybridserve.replicas.engine.scheduler import Scheduler, SchedulerLimits
from hybridserve.replicas.engine.validation import check_prompt, check_token_ids
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.sampling_params import SamplingParams


class Engine:
    """Continuous batching over one arena and one executor. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        model_config: ModelConfig,
        arena: Arena,
        executor: Executor,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        seed: int = 0,
    ) -> None:
        """`max_model_len` and `max_num_seqs` must already fit the arena (see `sizing`)."""
        self.model_config = model_config
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.arena = arena
        self._executor = executor
        self._scheduler = Scheduler(arena, SchedulerLimits(max_num_seqs, max_num_batched_tokens))
        self._requests: dict[str, Request] = {}
        self._seeds = random.Random(seed)
        self._step_ms = 0.0
        self._steps = 0

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request; `params.n` is the caller's business (one request gives one answer).

        Raises:
            ValueError: the prompt is empty, too long for the context, or holds a token outside the
                vocabulary, or `params` names one. Nothing is queued then.
        """
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        prompt = list(prompt_token_ids)
        check_prompt(prompt, self.model_config.vocab_size, self.max_model_len)
        check_token_ids(params, self.model_config.vocab_size)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        room = self.max_model_len - len(prompt)
        self._requests[request_id] = request = Request(
            request_id=request_id,
            token_ids=prompt,
            prompt_len=len(prompt),
            params=params,
            seed=seed,
            eos_token_ids=frozenset() if params.ignore_eos else frozenset(self.model_config.eos_token_ids),
            max_output=room if params.max_tokens is None else min(params.max_tokens, room),
        )
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds before the next step; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[EngineOutput]:
        """Plan and run one step; return the news of every request that has any."""
        began = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        result = self._executor.execute(plan)
        outputs = [out for s in plan.sequences if (out := self._advance(s, result)) is not None]
        if not self._requests:
            # nothing is owned now, so this costs little, and a leak is found where it was made
            self.arena.check_integrity()
        self._step_ms = (time.perf_counter() - began) * 1e3
        self._steps += 1
        return outputs

    def load(self) -> EngineLoad:
        arena, scheduler = self.arena, self._scheduler
        return EngineLoad(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.uncomputed_tokens(),
            units_used=arena.units_used,
            units_total=arena.units_total,
            pages_used=arena.pages_used,
            pages_total=arena.pages_total,
            free_extents=arena.free_extents,
            step_ms=self._step_ms,
            preemptions=scheduler.num_preemptions,
            steps=self._steps,
        )

    def _advance(self, sequence: ScheduledSequence, result: StepResult) -> EngineOutput | None:
        request = self._requests[sequence.request_id]
        request.num_computed_tokens += len(sequence.token_ids)
        request.prompt_logprobs += result.prompt_logprobs.get(request.request_id, ())
        sampled = result.sampled.get(request.request_id)
        if sampled is None:
            return None
        return self._append(request, sampled) if sampled.finite else self._fail(request)

    def _append(self, request: Request, sampled: Sampled) -> EngineOutput:
        request.token_ids.append(sampled.token_id)
        reason, stop_token_id = request.finish_reason()
        index = request.num_output_tokens - 1
        if reason is not None:
            self.abort(request.request_id)
        return EngineOutput(
            request_id=request.request_id,
            first_index=index,
            token_ids=(sampled.token_id,),
            logprobs=(sampled.logprobs,) if sampled.logprobs is not None else (),
            prompt_logprobs=tuple(request.prompt_logprobs) if index == 0 else (),
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_preemptions=request.num_preemptions,
            first_scheduled_time=request.first_scheduled_time,
        )

    def _fail(self, request: Request) -> EngineOutput:
        self.abort(request.request_id)
        return EngineOutput(
            request_id=request.request_id,
            first_index=request.num_output_tokens,
            finish_reason="error",
            error=f"the model gave NaN or Inf logits at token {len(request.token_ids)} of the sequence",
            num_preemptions=request.num_preemptions,
            first_scheduled_time=request.first_scheduled_time,
        )
