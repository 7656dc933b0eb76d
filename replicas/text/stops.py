"""Looking for stop strings in text that arrives in pieces.

Owns what may be shown already and what may still turn out to be the beginning of a stop string. Knows nothing
of tokens.
"""

from bisect import bisect_right
from collections.abc import Sequence


class StopScanner:
    """Shows text up to the first stop string.

    Which one wins: the first piece of text that completes a stop string ends the text; of the stop strings
    found by then the one that starts earliest, at an equal start the one listed first.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """
        Args:
            stops: non-empty strings, in order of preference.
            include: show the stop string itself too.
        """
        self._stops = tuple(stops)
        self._sorted = sorted(self._stops)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self.watches = bool(self._stops)
        """Without stop strings all text may be shown as it comes."""
        self.stopped: str | None = None
        """The stop string that was found."""

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown now.

        Args:
            text: the next piece.
            armed: False when a stop string that this piece completes is to be shown and ignored.
        """
        held = self._held + text
        if armed and self._stops:
            found = self._find(held)
            if found is not None:
                start, self.stopped = found
                self._held = ""
                return held[: start + len(self.stopped)] if self._include else held[:start]
        cut = self._first_possible_start(held)
        self._held = held[cut:]
        return held[:cut]

    def finish(self) -> str:
        """What was held back in case a stop string began there."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        matches = [(start, i) for i, stop in enumerate(self._stops) if (start := text.find(stop)) >= 0]
        if not matches:
            return None
        start, i = min(matches)
        return start, self._stops[i]

    def _first_possible_start(self, text: str) -> int:
        """Where the longest end of `text` begins that a stop string could go on from."""
        for start, character in enumerate(text):
            if character not in self._first_characters:
                continue
            end = text[start:]
            # the strings that go on from `end` come right after it in order
            i = bisect_right(self._sorted, end)
            if i < len(self._sorted) and self._sorted[i].startswith(end):
                return start
        return len(text)
