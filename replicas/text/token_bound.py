"""How many tokens a text has at least, told without tokenising it.

Holds for tokenizers that keep every byte of a text: then a text cannot have fewer tokens than its bytes, or
its letters, or its other characters, have room for in the vocabulary's longest. Knows nothing of models.
"""

import json
import string
from collections.abc import Iterable

from tokenizers import Tokenizer as FastTokenizer

_LETTERS = string.ascii_letters.encode()
_DIGITS = string.digits.encode()
_BLANK = string.whitespace.encode()
# composing characters (NFC) may make three bytes of nine, as with Hangul's letters
_MAX_COMPOSED = 3


class TokenBound:
    """A lower bound of a text's number of tokens.

    Args:
        fast: the tokenizer.
        tokens: the bytes of every token.
    """

    def __init__(self, fast: FastTokenizer, tokens: Iterable[bytes]) -> None:
        parts = json.loads(fast.to_str())
        normalizer = parts.get("normalizer")
        self._composes = normalizer is not None
        self._known = (
            _keeps_bytes(parts)
            and (normalizer is None or normalizer["type"] == "NFC")
            and not any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
        )
        if self._known:
            counts = [_count(token) for token in tokens]
            self._longest = tuple(map(max, zip(*counts, strict=True))) if counts else ()

    def at_least(self, text: str) -> int:
        """0 where nothing can be said. Takes a few milliseconds for megabytes."""
        if not self._known:
            return 0
        data = text.encode("utf-8", "surrogatepass")
        if self._composes and not text.isascii():
            return len(data) // (_MAX_COMPOSED * self._longest[0])
        # a token's share of each kind is at most the longest's, so each kind bounds the tokens by itself
        return max(
            -(-count // longest)
            for count, longest in zip(_count(data), self._longest, strict=True)
            if longest
        )


def _count(data: bytes) -> tuple[int, int, int, int, int]:
    """Bytes: all, letters, digits, blanks, and others."""
    letters, digits, blanks = (
        len(data) - len(data.translate(None, kind)) for kind in (_LETTERS, _DIGITS, _BLANK)
    )
    return len(data), letters, digits, blanks, len(data) - letters - digits - blanks


def _keeps_bytes(parts: dict) -> bool:
    """Whether ids say all of the text's bytes: byte-level, and nothing is cut out before."""
    decoder, before = parts.get("decoder"), parts.get("pre_tokenizer")
    if decoder is None or decoder["type"] != "ByteLevel" or before is None:
        return False
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    kinds = {step["type"] for step in steps}
    cut = any(step.get("behavior") == "Removed" for step in steps)
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Split", "Digits"} and not cut
