"""Step plans as bytes, for the ranks of a replica that do not plan: what is new since the last plan, msgpack.

Both ends remember the requests of the last plans in the same way. A request's name, its way of sampling and
its page table are said once; then only what was appended to the table, or all of it again when it starts over
or when pages were moved. Everything goes by columns over the plan's sequences, as a loop over 256 of them in
Python takes several times as long.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from typing import Any

import msgpack

from hybridserve.replicas.arena.arena import Copies
from hybridserve.replicas.engine.plan import SampleSpec, ScheduledSequence, StepPlan
from hybridserve.replicas.sampling_params import SamplingParams

REMEMBERED_STEPS = 64
"""A request that has been in none of so many plans is forgotten."""

_NO_SAMPLE = SampleSpec(None, 0, -1, 0, (), ())
"""Stands for None in columns; its position says so."""
_HUGE = 1
"""Code of an integer that 64 bits do not hold, in digits."""
_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}

# the fields of a named tuple from an iterable, without a call of Python's own
_sample_of = partial(tuple.__new__, SampleSpec)
_sequence_of = partial(tuple.__new__, ScheduledSequence)


@dataclass(slots=True)
class _Sent:
    """What the others know of a request."""

    number: int
    table: Sequence[int]
    """The request's own list, which tells one request from another that took its id."""
    num_pages: int = 0
    last_plan: int = 0
    traits: tuple = ()
    """What seldom changes: (params, seed, prompt_len, banned_token_ids, stagger, prompt_logprobs)."""
    has_penalty: bool = False
    history_len: int = 0
    """Entries of the sample's `token_ids`, which go to who has penalties."""


class PlanEncoder:
    """The planning end. Every plan must reach every decoder, in order."""

    def __init__(self) -> None:
        self._known: dict[str, _Sent] = {}
        self._plans = 0
        self._requests = 0
        # one for all: each has a buffer of a megabyte
        self._packer = msgpack.Packer()

    def encode(self, plan: StepPlan) -> bytes:
        """The plan's own lists are read before this returns."""
        self._plans += 1
        head = (plan.step, plan.num_decodes, _flat(plan.copies.pages), _flat(plan.copies.units))
        if not plan.sequences:
            return self._packer.pack((head, None))
        if plan.copies.pages:
            # any table may have been patched, also of a request that this plan leaves out
            for one in self._known.values():
                one.num_pages = 0
        columns = zip(*plan.sequences, strict=True)
        ids, tokens, contexts, units, tables, samples, recurrent, staggers, prompt_logprobs, following = (
            columns
        )
        params, seeds, positions, prompt_lens, histories, banned = zip(
            *[s or _NO_SAMPLE for s in samples], strict=True
        )
        sent, names = self._requests_of(ids, tables)
        traits = list(zip(params, seeds, prompt_lens, banned, staggers, prompt_logprobs, strict=True))
        body = (
            [one.number for one in sent],
            names,
            _new_traits(sent, traits),
            _new_history(sent, histories),
            _new_pages(sent, tables, contexts),
            list(map(len, tokens)),
            list(chain.from_iterable(tokens)),
            contexts,
            units,
            positions,
            recurrent,
            [(at, ids) for at, ids in enumerate(following) if ids] if any(following) else (),
        )
        _forget(self._known, self._plans)
        return self._packer.pack((head, body))

    def _requests_of(
        self, ids: Sequence[str], tables: Sequence[Sequence[int]]
    ) -> tuple[list[_Sent], list[tuple[int, str]]]:
        """What the others know of each request, and (place, name) of those who are new to them."""
        sent = list(map(self._known.get, ids))
        names = []
        for at, (one, table) in enumerate(zip(sent, tables, strict=True)):
            if one is None or one.table is not table:
                self._requests += 1
                sent[at] = one = self._known[ids[at]] = _Sent(self._requests, table)
                names.append((at, ids[at]))
            one.last_plan = self._plans
        return sent, names


def _new_traits(sent: Sequence[_Sent], traits: Sequence[tuple]) -> list[tuple]:
    """(place, packed traits) where the others know other ones."""
    told = []
    for at, (one, now) in enumerate(zip(sent, traits, strict=True)):
        if one.traits != now:
            one.traits = now
            params = now[0]
            one.has_penalty = params is not None and params.has_penalty
            told.append((at, None if params is None else _pack_params(params), *now[1:]))
    return told


def _new_history(sent: Sequence[_Sent], histories: Sequence[Sequence[int]]) -> list[tuple]:
    """(place, entries) that were appended to what penalties count."""
    told = []
    for at in [at for at, one in enumerate(sent) if one.has_penalty]:
        told.append((at, histories[at][sent[at].history_len :]))
        sent[at].history_len = len(histories[at])
    return told


def _new_pages(
    sent: Sequence[_Sent], tables: Sequence[Sequence[int]], contexts: Sequence[int]
) -> list[tuple]:
    """(place, entries that stay, entries after those) where a table has changed."""
    told = []
    for at, (one, length, context) in enumerate(zip(sent, map(len, tables), contexts, strict=True)):
        # a sequence that starts over has other pages, in the same list
        if one.num_pages != length or not context:
            kept = one.num_pages if context and one.num_pages <= length else 0
            told.append((at, kept, tables[at][kept:]))
            one.num_pages = length
    return told


@dataclass(slots=True)
class _Known:
    """A request as it was told."""

    request_id: str
    last_plan: int = 0
    table: list[int] = field(default_factory=list)
    traits: tuple = ()
    history: list[int] = field(default_factory=list)


class PlanDecoder:
    """The other end: equal plans, except that a sample's `token_ids` are there for penalties alone.

    A request keeps its lists from plan to plan, as it does where plans are made.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._plans = 0

    def decode(self, message: bytes) -> StepPlan:
        self._plans += 1
        (step, num_decodes, *moves), body = msgpack.unpackb(
            message, strict_map_key=False, ext_hook=_unpack_huge
        )
        sequences = self._sequences(*body) if body is not None else ()
        _forget(self._known, self._plans)
        return StepPlan(step, sequences, num_decodes, Copies(*map(_pairs, moves)))

    def _sequences(
        self,
        numbers: Sequence[int],
        names: Iterable[tuple[int, str]],
        new_traits: Iterable[tuple],
        new_history: Iterable[tuple],
        new_pages: Iterable[tuple],
        counts: Sequence[int],
        tokens: Sequence[int],
        contexts: Sequence[int],
        units: Sequence[int],
        positions: Sequence[int],
        recurrent: Sequence[int],
        new_following: Iterable[tuple],
    ) -> tuple[ScheduledSequence, ...]:
        for at, name in names:
            self._known[numbers[at]] = _Known(name)
        known = [self._known[number] for number in numbers]
        for one in known:
            one.last_plan = self._plans
        for at, packed, seed, prompt_len, banned, *rest in new_traits:
            params = None if packed is None else SamplingParams(**packed)
            known[at].traits = (params, seed, prompt_len, tuple(banned), *rest)
        for at, entries in new_history:
            known[at].history += entries
        for at, kept, entries in new_pages:
            known[at].table[kept:] = entries
        following: list[Sequence[int]] = [()] * len(known)
        for at, ids in new_following:
            following[at] = ids
        params, seeds, prompt_lens, banned, staggers, prompt_logprobs = zip(
            *[one.traits for one in known], strict=True
        )
        histories = [one.history for one in known]
        samples = map(_sample_of, zip(params, seeds, positions, prompt_lens, histories, banned, strict=True))
        columns = (
            [one.request_id for one in known],
            _cut(tokens, counts),
            contexts,
            units,
            [one.table for one in known],
            [sample if sample.position >= 0 else None for sample in samples],
            recurrent,
            staggers,
            prompt_logprobs,
            following,
        )
        return tuple(map(_sequence_of, zip(*columns, strict=True)))


def _cut(tokens: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    """`tokens` in pieces of `counts`."""
    if len(tokens) == len(counts):
        return [[token] for token in tokens]
    pieces, start = [], 0
    for count in counts:
        pieces.append(tokens[start : start + count])
        start += count
    return pieces


def _forget(known: dict[Any, Any], plans: int) -> None:
    """Both ends drop the same requests at the same plan."""
    if plans % REMEMBERED_STEPS:
        return
    for key in [key for key, one in known.items() if one.last_plan <= plans - REMEMBERED_STEPS]:
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


def _flat(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return list(chain.from_iterable(pairs))


def _pairs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))
