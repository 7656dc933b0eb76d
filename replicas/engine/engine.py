"""The step loop's body: requests in, tokens out.

Where the executor overlaps, step n + 1 is planned and handed over while step n runs, and only then are the
tokens of n read: the planner counts a token that is not known yet as `PENDING`. The end of a sequence is then
seen one step late, unless it is its length's; what the late step draws for it is dropped.
Owns the requests and their ends. Touches no tensor (the executor does) and no text (callers detokenise).
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.engine.executor import Executor, RunningStep
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput, Sampled, StepPlan, StepResult
from hybridserve.replicas.engine.request import Request
from hybridserve.replicas.engine.scheduler import Scheduler, SchedulerLimits
from hybridserve.replicas.engine.startup import StartupReport
from hybridserve.replicas.engine.validation import check_output, check_prompt, check_token_ids
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.sampling_params import SamplingParams


@dataclass(frozen=True)
class _Share:
    """What a request has in a step that was handed over."""

    request: Request
    num_preemptions: int
    """The request's when the step was planned: prompt logprobs from before a preemption are made again."""
    samples: bool


@dataclass(frozen=True)
class _InFlight:
    step: RunningStep
    shares: tuple[_Share, ...]


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
        startup_report: StartupReport | None = None,
    ) -> None:
        """`max_model_len` and `max_num_seqs` must already fit the arena (see `sizing`)."""
        self.startup_report = startup_report or StartupReport()
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
        self._in_flight: _InFlight | None = None
        self._is_shut_down = False

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Queue a request; `params.n` is the caller's business (one request gives one answer).

        output_token_ids: what another engine has already answered. The request goes on after it as one that
            was preempted there: limits, penalties, indexes and draws count it as its own (draws only with
            a `params.seed`), prompt log-probabilities are not told again.

        Raises:
            ValueError: the prompt is empty, too long for the context, or holds a token outside the
                vocabulary, or `params` names one; or the answer so far is complete. Nothing is queued then.
            RuntimeError: the engine was shut down.
        """
        if self._is_shut_down:
            raise RuntimeError("the engine was shut down")
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use")
        prompt = list(prompt_token_ids)
        check_prompt(prompt, self.model_config.vocab_size, self.max_model_len)
        check_token_ids(params, self.model_config.vocab_size)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        room = self.max_model_len - len(prompt)
        request = Request(
            request_id=request_id,
            token_ids=[*prompt, *output_token_ids],
            prompt_len=len(prompt),
            params=params,
            seed=seed,
            eos_token_ids=frozenset() if params.ignore_eos else frozenset(self.model_config.eos_token_ids),
            max_output=room if params.max_tokens is None else min(params.max_tokens, room),
        )
        if output_token_ids:
            check_output(output_token_ids, self.model_config.vocab_size)
            if request.finish_reason() != (None, None):
                raise ValueError(f"the answer's {len(output_token_ids)} tokens so far are all of it")
            # they went out with the first token
            request.params = replace(params, prompt_logprobs=None)
        self._requests[request_id] = request
        self._scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds before the next step; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._scheduler.remove(request)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[EngineOutput]:
        """Plan a step, run it, and return the news of every request that has any.

        Where the executor overlaps, the news are those of the step before; a call may have none.
        """
        began = time.perf_counter()
        outputs: list[EngineOutput] = []
        if self._scheduler.awaits_results:
            outputs += self._collect()
        plan = self._scheduler.schedule()
        submitted = self._submit(plan) if plan is not None else None
        outputs += self._collect()
        self._in_flight = submitted
        if not self._executor.overlaps or not self._requests:
            # with no request left, what still runs is nobody's
            outputs += self._collect()
        if not self._requests:
            # nothing is owned now, so this costs little, and a leak is found where it was made
            self.arena.check_integrity()
        self._step_ms = (time.perf_counter() - began) * 1e3
        self._steps += 1
        return outputs

    def check(self) -> None:
        """Raise where no step can be made any more, as another rank is dead or stuck; for idle times."""
        self._executor.check()

    def shutdown(self) -> None:
        """Forget all requests and end the processes of other ranks, if there are any; none may follow."""
        self._is_shut_down = True
        for request_id in list(self._requests):
            self.abort(request_id)
        self._executor.shutdown()

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

    def _submit(self, plan: StepPlan) -> _InFlight:
        requests = [self._requests[s.request_id] for s in plan.sequences]
        shares = tuple(
            _Share(request, request.num_preemptions, sequence.sample is not None)
            for request, sequence in zip(requests, plan.sequences, strict=True)
        )
        return _InFlight(self._executor.submit(plan), shares)

    def _collect(self) -> list[EngineOutput]:
        """The news of the step in flight, if there is one."""
        if self._in_flight is None:
            return []
        running, self._in_flight = self._in_flight, None
        result = running.step.result()
        news = (self._advance(share, result) for share in running.shares)
        return [out for out in news if out is not None]

    def _advance(self, share: _Share, result: StepResult) -> EngineOutput | None:
        request = share.request
        if self._requests.get(request.request_id) is not request:
            # it ended, or was aborted, while the step ran
            return None
        if share.num_preemptions == request.num_preemptions:
            request.prompt_logprobs += result.prompt_logprobs.get(request.request_id, ())
        if not share.samples:
            return None
        request.num_pending_tokens -= 1
        sampled = result.sampled[request.request_id]
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
