"""From an engine's news of one answer to pieces of its text, and to how it ended.

The one place that knows which tokens are shown: the offline API and the ingress both feed it. Torch-free.
Knows nothing of logprobs or of who ends the engine's request when a stop string did.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.detokenizer import IncrementalDetokenizer
from hybridserve.replicas.text.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """What one piece of news adds to an answer."""

    text: str
    num_tokens: int
    """How many of the news' tokens belong to the answer: those up to the one that completed a stop string."""
    finish_reason: str | None
    stop_reason: int | str | None
    """The stop string or the `stop_token_ids` entry that ended it."""


class AnswerText:
    """The text of one answer while news of it arrive.

    The token that ends an answer (an end-of-sequence token or an entry of `stop_token_ids`) counts among its
    tokens but is not shown, unless `include_stop_str_in_output` asks for it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params)
        self._shows_stop = params.include_stop_str_in_output

    def take(self, news: EngineOutput) -> TextPiece:
        """The next news, in order; none may follow a piece with a finish_reason."""
        detokenizer = self._detokenizer
        hidden = news.finish_reason == "stop" and not self._shows_stop
        before = detokenizer.num_tokens
        text = detokenizer.push(news.token_ids[:-1] if hidden else news.token_ids)
        num_tokens = len(news.token_ids)
        if detokenizer.stopped is not None:
            num_tokens = detokenizer.num_tokens - before
        elif news.finished:
            text += detokenizer.finish()
        if detokenizer.stopped is not None:
            return TextPiece(text, num_tokens, "stop", detokenizer.stopped)
        return TextPiece(text, num_tokens, news.finish_reason, news.stop_token_id)
