"""One answer while the engine's news of it arrive: text, logprobs, times and how it ended.

Owns turning `EngineOutput`s into a `CompletionOutput`. Torch-free. Knows nothing of the engine beyond its
news; whoever feeds it ends the request when `needs_abort` is set.
"""

import time
from collections.abc import Sequence

from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs
from hybridserve.replicas.outputs import CompletionOutput, Logprob
from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.answer_text import AnswerText, TextPiece
from hybridserve.replicas.text.tokenizer import Tokenizer


class Answer:
    """The answer to one engine request."""

    def __init__(
        self, index: int, prompt_token_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        """
        Args:
            index: the answer's number among the `n` of its prompt.
            prompt_token_ids: what is answered.
            params: of this one answer.
            tokenizer: the model's.
        """
        self._tokenizer = tokenizer
        self._text = AnswerText(tokenizer, prompt_token_ids, params)
        self.output = CompletionOutput(index=index, text="", token_ids=[])
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_preemptions = 0
        self.arrival_time = time.monotonic()
        self.first_scheduled_time = 0.0
        self.first_token_time = 0.0
        self.finished_time = 0.0
        self.needs_abort = False
        """A stop string ended the answer while the engine goes on."""

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def add(self, news: EngineOutput) -> str:
        """Take the engine's news and return what they add to the text; nothing once the answer is finished.

        The answer keeps the tokens up to the one that completed a stop string. An engine error ends it with
        finish_reason "error" and the message as its stop_reason.
        """
        if self.finished:
            return ""
        assert news.first_index == len(self.output.token_ids), (news.first_index, len(self.output.token_ids))
        now = time.monotonic()
        if news.token_ids and not self.output.token_ids:
            self.first_token_time = now
            self._take_prompt_logprobs(news)
        self.first_scheduled_time = news.first_scheduled_time
        self.num_preemptions = news.num_preemptions
        piece = self._text.take(news)
        self.output.text += piece.text
        self._keep_tokens(news, piece.num_tokens)
        self._end(news, piece, now)
        return piece.text

    def _keep_tokens(self, news: EngineOutput, kept: int) -> None:
        self.output.token_ids += news.token_ids[:kept]
        if self.output.logprobs is None:
            return
        for token_id, logprobs in zip(news.token_ids[:kept], news.logprobs[:kept], strict=True):
            self.output.logprobs.append(logprob_table(self._tokenizer, token_id, logprobs))
            self.output.cumulative_logprob += logprobs.logprob

    def _take_prompt_logprobs(self, news: EngineOutput) -> None:
        if self._wants_prompt_logprobs:
            rows = [logprob_table(self._tokenizer, *row) for row in news.prompt_logprobs]
            self.prompt_logprobs = [None, *rows]

    def _end(self, news: EngineOutput, piece: TextPiece, now: float) -> None:
        if piece.finish_reason is None:
            return
        self.output.finish_reason = piece.finish_reason
        self.output.stop_reason = news.error if piece.finish_reason == "error" else piece.stop_reason
        self.needs_abort = not news.finished
        self.finished_time = now
        if not self.output.token_ids:
            self.first_token_time = now


def logprob_table(tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
    """The chosen token first, then the likeliest ones, best first; a token that is both comes once."""
    table = {token_id: Logprob(logprobs.logprob, logprobs.rank, tokenizer.token_text(token_id))}
    likeliest = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    for rank, (other, logprob) in enumerate(likeliest, start=1):
        if other not in table:
            table[other] = Logprob(logprob, rank, tokenizer.token_text(other))
    return table
