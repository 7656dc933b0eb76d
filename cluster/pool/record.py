"""All news of one request put together: what the unary reply carries.

Plain data; knows nothing of queues, sockets or Ray.
"""

from dataclasses import dataclass, replace

from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs


class OutputRecord:
    """Collects a request's outputs in order.

    first_index: of the first output token that is expected.
    """

    def __init__(self, request_id: str, first_index: int = 0) -> None:
        self._first_index = first_index
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        self._last = EngineOutput(request_id, first_index)

    def append(self, output: EngineOutput) -> None:
        expected = self._first_index + len(self._token_ids)
        assert output.first_index == expected, (output.first_index, expected)
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        self._last = output

    def merged(self) -> EngineOutput:
        """One output that says everything said so far."""
        return replace(
            self._last,
            first_index=self._first_index,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )


@dataclass(frozen=True)
class GenerationReply:
    """What the unary call returns. Exactly one field is set: errors travel as words, not as tracebacks."""

    output: EngineOutput | None = None
    """Everything the replica produced for the request; it is `finished`."""
    refused: str | None = None
    """The engine would not take the request; a message for the client."""
    failed: str | None = None
    """The pool could not finish it."""
