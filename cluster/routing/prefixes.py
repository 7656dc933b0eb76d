"""Which replica last saw a prompt's beginning: a hint for caches, never a reason to overload one."""

from collections import OrderedDict
from collections.abc import Sequence

PREFIX_TOKENS = 128
"""Prompts are alike when these first tokens are; shorter prompts have no hint."""
_MAX_PREFIXES = 8192


def prefix_of(prompt_token_ids: Sequence[int]) -> int | None:
    """A hash of the prompt's beginning, for use within one process; None for a short prompt."""
    if len(prompt_token_ids) < PREFIX_TOKENS:
        return None
    return hash(tuple(prompt_token_ids[:PREFIX_TOKENS]))


class LastReplicas:
    """The replica that each of the most recent prefixes went to."""

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[int, str] = OrderedDict()

    def get(self, prefix: int | None) -> str | None:
        return None if prefix is None else self._replicas.get(prefix)

    def put(self, prefix: int | None, replica: str) -> None:
        if prefix is None:
            return
        self._replicas[prefix] = replica
        self._replicas.move_to_end(prefix)
        if len(self._replicas) > self._max_prefixes:
            self._replicas.popitem(last=False)
