"""Token ids to text one id at a time, never a part of a character.

Owns two ways of doing it: joining bytes, for byte-level vocabularies, and decoding a small window of ids, for
all others. Knows nothing of stop strings.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from hybridserve.replicas.text.tokenizer import Tokenizer

_WINDOW = 6
_MAX_CHARACTER_BYTES = 4
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream(Protocol):
    """Text of a growing list of ids."""

    def push(self, token_id: int) -> str:
        """The text that this id completes, possibly none."""

    def finish(self) -> str:
        """What was held back, the parts of an unfinished character as U+FFFD."""


def text_stream(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
) -> TextStream:
    """The stream that fits the tokenizer."""
    if tokenizer.byte_level:
        return ByteStream(tokenizer, skip_special_tokens)
    return WindowStream(tokenizer, prompt_token_ids, skip_special_tokens)


class ByteStream:
    """Joins the ids' bytes through an incremental UTF-8 decoder.

    Equal to decoding all ids at once, invalid bytes included: both replace each maximal broken part by one
    U+FFFD. (The tokenizers library's DecodeStream is not: it keeps or loses text around invalid bytes.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside_character = False

    def push(self, token_id: int) -> str:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if not self._inside_character and data.isascii():
            # nearly every token, for a third of the decoder's time
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._inside_character = self._decoder.getstate()[0] != b""
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """Decodes the ids since the last complete character, with a few ids before them for context.

    For vocabularies whose text for an id depends on its neighbours: a leading space that only the first id of
    a text loses, characters spelled by byte tokens. The context begins in the prompt, so that an answer keeps
    the space between the prompt's last word and its first. Text ends with U+FFFD while a character is
    incomplete and is held back, but no longer than a character can take.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = [i for i in prompt_token_ids[-_WINDOW:] if not self._skips(i)]
        self._shown = self._decode()
        self._pending = 0

    def push(self, token_id: int) -> str:
        if self._skips(token_id):
            return ""
        self._window.append(token_id)
        self._pending += 1
        text = self._decode()
        if text.endswith(_REPLACEMENT) and self._pending < _MAX_CHARACTER_BYTES:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode()) if self._pending else ""

    def _skips(self, token_id: int) -> bool:
        return self._skip_special_tokens and self._tokenizer.is_special(token_id)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _advance(self, text: str) -> str:
        delta = text[len(self._shown) :]
        # the ids just shown are the context of the next
        self._window = self._window[-self._pending :]
        self._shown = self._decode()
        self._pending = 0
        return delta
