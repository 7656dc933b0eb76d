"""The text of one answer while its tokens arrive.

Owns the order of things: ids to text, then stop strings, then what may be shown. Knows nothing of the engine;
whoever sees `stopped` set has to end the request.
"""

from collections.abc import Sequence

from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.stops import StopScanner
from hybridserve.replicas.text.streams import text_stream
from hybridserve.replicas.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns output ids into text deltas.

    The deltas joined are the text of all ids decoded at once, up to the first stop string, however the ids
    were cut into pushes. No delta ends inside a character. A stop string counts if a token after the first
    `min_tokens` completes it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """
        Args:
            tokenizer: the model's.
            prompt_token_ids: context of the first output ids, never part of the text.
            params: `stop`, `include_stop_str_in_output`, `min_tokens` and `skip_special_tokens` are read.
        """
        self._stream = text_stream(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._scanner = StopScanner(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        """Output ids taken so far, up to and with the one that completed a stop string."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._scanner.stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """What the next output ids add to the text; ids after a stop string are ignored."""
        text = ""
        scanner = self._scanner
        for token_id in token_ids:
            if scanner.stopped is not None:
                break
            self.num_tokens += 1
            delta = self._stream.push(token_id)
            text += self._show(delta) if scanner.watches else delta
        return text

    def finish(self) -> str:
        """The rest of the text, once no more ids will come."""
        if self.stopped is not None:
            return ""
        return self._show(self._stream.finish()) + self._scanner.finish()

    def _show(self, text: str) -> str:
        return self._scanner.push(text, armed=self.num_tokens > self._min_tokens)
