"""Step plans as bytes, for the ranks of a replica that do not plan: what is new since the last plan, in msgpack.

Both ends remember the requests of the last plans in the same way. A request's name, its way of sampling and its
page table are said once; then only what was appended to the table, or all of it again when it starts over or
when pages were moved.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgpack

from hybridserve.replicas.arena.arena import Copies
from hybridserve.replicas.engine.plan import SampleSpec, ScheduledSequence, StepPlan
from hybridserve.replicas.sampling_params import SamplingParams

REMEMBERED_STEPS = 64
"""A request that has been in none of so many plans is forgotten."""
ROW_INTS = 8
_HUGE = 1
"""Code of an integer that 64 bits do not hold, in digits."""
_DEFAULTS = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}


@dataclass(slots=True)
class _Sent:
    """What the others know of a request."""

    number: int
    table: Sequence[int]
    """The request's own list, which tells one request from another that took its id."""
    num_pages: int
    last_step: int
    sample: tuple | None = None
    """(params, seed, prompt_len, banned_token_ids)"""
    history: int = 0
    """Entries of the sample's `token_ids`."""
    extras: tuple = ()
    """(stagger, prompt_logprobs)"""


class PlanEncoder:
    """The planning end. Every plan must reach every decoder, in order."""

    def __init__(self) -> None:
        self._known: dict[str, _Sent] = {}
        self._plans = 0
        self._requests = 0

    def encode(self, plan: StepPlan) -> bytes:
        """The plan's own lists are read before this returns."""
        self._plans += 1
        copies = plan.copies
        if copies.pages:
            # any table may have been patched, also of a request that this plan leaves out
            for sent in self._known.values():
                sent.num_pages = 0
        rows: list[int] = []
        tokens: list[int] = []
        pages: list[int] = []
        news: list[Any] = []
        for at, sequence in enumerate(plan.sequences):
            self._row(at, sequence, rows, tokens, pages, news)
        _forget(self._known, self._plans)
        message = (
            plan.step,
            plan.num_decodes,
            _flat(copies.pages),
            _flat(copies.units),
            rows,
            tokens,
            pages,
            news,
        )
        return msgpack.packb(message)

    def _row(
        self,
        at: int,
        sequence: ScheduledSequence,
        rows: list[int],
        tokens: list[int],
        pages: list[int],
        news: list[Any],
    ) -> None:
        """Append what the others need of a sequence: numbers, and in `news` what changes seldom."""
        request_id, token_ids, context_len, unit, table, sample, recurrent, *extras, following = sequence
        sent = self._known.get(request_id)
        name = None
        if sent is None or sent.table is not table:
            self._requests += 1
            sent = self._known[request_id] = _Sent(self._requests, table, 0, 0)
            name = request_id
        sent.last_step = self._plans
        length = len(table)
        kept = sent.num_pages if context_len and sent.num_pages <= length else 0
        if kept < length:
            pages += table[kept:]
        sent.num_pages = length
        tokens += token_ids
        position = -1 if sample is None else sample.position
        rows += (sent.number, len(token_ids), context_len, unit, kept, length - kept, position, recurrent)
        changed = self._changes(sent, sample, tuple(extras))
        if name is not None or changed is not None or following:
            news.append((at, name, changed, following if following else ()))

    def _changes(self, sent: _Sent, sample: SampleSpec | None, extras: tuple) -> tuple | None:
        """(extras, sample's constants, where its history goes on, the history's entries from there), each of
        the first two None where it is known."""
        says_extras = extras if extras != sent.extras else None
        sent.extras = extras
        if sample is None:
            return None if says_extras is None else (says_extras, None, 0, ())
        params = sample.params
        constants = (params, sample.seed, sample.prompt_len, sample.banned_token_ids)
        says_sample = None
        known = sent.sample
        if known is None or known[0] is not params or known[1:] != constants[1:]:
            says_sample = (_pack_params(params), *constants[1:])
            sent.sample = constants
        start, entries = 0, ()
        if params.has_penalty:
            start, entries = sent.history, sample.token_ids[sent.history :]
            sent.history = len(sample.token_ids)
        if says_extras is None and says_sample is None and not entries:
            return None
        return says_extras, says_sample, start, entries


@dataclass(slots=True)
class _Known:
    """A request as it was told."""

    request_id: str
    table: list[int]
    last_step: int
    sample: tuple | None
    history: list[int]
    extras: tuple


class PlanDecoder:
    """The other end: equal plans, except that a sample's `token_ids` are there for penalties alone.

    A request keeps its lists from plan to plan, as it does where plans are made.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._plans = 0

    def decode(self, message: bytes) -> StepPlan:
        self._plans += 1
        step, num_decodes, moved_pages, moved_units, rows, tokens, pages, news = msgpack.unpackb(
            message, strict_map_key=False, use_list=True, ext_hook=_unpack_huge
        )
        told = {at: what for at, *what in news}
        sequences = []
        token_at = page_at = 0
        for at in range(len(rows) // ROW_INTS):
            number, count, context_len, unit, kept, added, position, recurrent = rows[
                at * ROW_INTS : (at + 1) * ROW_INTS
            ]
            following: Sequence[int] = ()
            if at in told:
                name, changed, following = told[at]
                if name is not None:
                    self._known[number] = _Known(name, [], 0, None, [], ())
                if changed is not None:
                    _learn(self._known[number], *changed)
            known = self._known[number]
            known.last_step = self._plans
            known.table[kept:] = pages[page_at : page_at + added]
            page_at += added
            sample = None
            if position >= 0:
                params, seed, prompt_len, banned = known.sample
                sample = SampleSpec(params, seed, position, prompt_len, known.history, banned)
            sequences.append(
                ScheduledSequence(
                    known.request_id,
                    tokens[token_at : token_at + count],
                    context_len,
                    unit,
                    known.table,
                    sample,
                    recurrent,
                    *known.extras,
                    following,
                )
            )
            token_at += count
        _forget(self._known, self._plans)
        copies = Copies(_pairs(moved_pages), _pairs(moved_units))
        return StepPlan(step, tuple(sequences), num_decodes, copies)


def _learn(
    known: _Known, extras: list | None, sample: list | None, start: int, entries: Sequence[int]
) -> None:
    if extras is not None:
        known.extras = tuple(extras)
    if sample is not None:
        packed, seed, prompt_len, banned = sample
        known.sample = (_unpack_params(packed), seed, prompt_len, tuple(banned))
    if entries:
        known.history[start:] = entries


def _forget(known: dict[Any, Any], plans: int) -> None:
    """Both ends drop the same requests at the same plan."""
    if plans % REMEMBERED_STEPS:
        return
    for key in [k for k, request in known.items() if request.last_step <= plans - REMEMBERED_STEPS]:
        del known[key]


def _pack_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    return {
        name: _pack_value(value)
        for name, default in _DEFAULTS.items()
        if (value := getattr(params, name)) != default
    }


def _pack_value(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgpack.ExtType(_HUGE, str(value).encode())
    return value


def _unpack_huge(code: int, data: bytes) -> int:
    assert code == _HUGE, code
    return int(data)


def _unpack_params(packed: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**packed)


def _flat(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return [number for pair in pairs for number in pair]


def _pairs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))
