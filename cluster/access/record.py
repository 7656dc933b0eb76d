"""What one HTTP request turns out to cost, noted as it is answered, for its key's limits and the audit log.

The record of the request being answered is `current_record()`, in whatever task works on it. Where nobody
keeps records it is one that forgets everything.
"""

from contextvars import ContextVar

from hybridserve.cluster.access.key_limits import KeyUse

# an answer that nothing came of for these reasons costs its key nothing
_NOT_SERVED = (429, 503)


class RequestRecord:
    """One request's tokens and ends.

    Args:
        use: of its key, when that has one.
        keeps_text: whether answers' texts are wanted.
    """

    __slots__ = (
        "_credit",
        "_is_charged",
        "_keeps_text",
        "_use",
        "answer_id",
        "completion_tokens",
        "finish_reasons",
        "model",
        "prompt_tokens",
        "texts",
    )

    def __init__(self, use: KeyUse | None = None, keeps_text: bool = False) -> None:
        self._use = use
        self._keeps_text = keeps_text
        self._credit = 0
        self._is_charged = False
        self.answer_id: str | None = None
        self.model: str | None = None
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.finish_reasons: dict[int, str] = {}
        """By the answer's index."""
        self.texts: dict[int, list[str]] = {}

    def admit(self, answer_id: str, model: str, prompt_tokens: int, expected_tokens: int) -> None:
        """The prompt is known, and nothing computed yet.

        Args:
            expected_tokens: of all answers.

        Raises:
            PoolBusy: the key has used up its tokens for now.
        """
        self.answer_id, self.model, self.prompt_tokens = answer_id, model, prompt_tokens
        if self._use is not None:
            self._use.take_tokens(prompt_tokens + expected_tokens)
            self._credit, self._is_charged = expected_tokens, True

    def add(self, index: int, tokens: int, text: str) -> None:
        """Answer `index` has gained tokens."""
        self.completion_tokens += tokens
        if self._is_charged:
            self._credit -= tokens
            if self._credit < 0:
                # more than was expected: charged as it comes
                self._use.correct_tokens(self._credit)
                self._credit = 0
        if self._keeps_text:
            self.texts.setdefault(index, []).append(text)

    def end_answer(self, index: int, reason: str) -> None:
        self.finish_reasons[index] = reason

    def settle(self, status: int) -> None:
        """The request is over: what was charged becomes what was used."""
        if not self._is_charged:
            return
        self._is_charged = False
        not_served = self.completion_tokens == 0 and status in _NOT_SERVED
        self._use.correct_tokens(self._credit + (self.prompt_tokens if not_served else 0))


class _NoRecord(RequestRecord):
    """Shared by all requests that nobody keeps a record of."""

    __slots__ = ()

    def admit(self, answer_id: str, model: str, prompt_tokens: int, expected_tokens: int) -> None:
        """Everything is admitted."""

    def add(self, index: int, tokens: int, text: str) -> None:
        """Not kept."""

    def end_answer(self, index: int, reason: str) -> None:
        """Not kept."""


_current: ContextVar[RequestRecord] = ContextVar("hybridserve_request_record", default=_NoRecord())  # noqa: B039

current_record = _current.get
set_current_record = _current.set
reset_current_record = _current.reset
