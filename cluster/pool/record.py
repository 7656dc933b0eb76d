"""All news of one request put together, and cut again: what the unary reply carries and what fills a gap.

Plain data; knows nothing of queues, sockets or Ray.
"""

from dataclasses import dataclass, replace

from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs


class OutputRecord:
    """Collects a request's outputs in order."""

    def __init__(self, request_id: str) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        self._last = EngineOutput(request_id=request_id, first_index=0)

    def append(self, output: EngineOutput) -> None:
        assert output.first_index == len(self._token_ids), (output.first_index, len(self._token_ids))
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        self._last = output

    def merged(self) -> EngineOutput:
        """One output that says everything said so far."""
        return replace(
            self._last,
            first_index=0,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )


def after(output: EngineOutput, index: int) -> EngineOutput:
    """What `output` says from the request's output token `index` on, not having said what comes before."""
    known = index - output.first_index
    if known <= 0:
        return output
    return replace(
        output,
        first_index=index,
        token_ids=output.token_ids[known:],
        logprobs=output.logprobs[known:],
        prompt_logprobs=(),
    )


@dataclass(frozen=True)
class GenerationReply:
    """What the unary call returns. Exactly one field is set: errors travel as words, not as tracebacks."""

    output: EngineOutput | None = None
    """Everything the request produced; it is `finished`."""
    refused: str | None = None
    """The engine would not take the request; a message for the client."""
    failed: str | None = None
    """The pool could not finish it."""
