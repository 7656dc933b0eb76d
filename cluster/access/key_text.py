"""The keys file as text: YAML, or JSON, which is YAML too; what is wrong with it is told with its line."""

from datetime import UTC, datetime

import yaml
from pydantic import ValidationError

from hybridserve.cluster.access.keys import MAX_LIVE_KEYS, KeyEntry

_ROOT = "keys"
_LONGEST_TEXT = 4 * 2**20


class KeysError(ValueError):
    """A keys file that cannot be used; the message has the line, where there is one, and the reason."""


# libyaml, where PyYAML was built with it, is ten times as fast: a server reads the file while it serves
_Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):
    """Leaves date-times as they were written: PyYAML's own reading loses that a timezone is missing."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_keys(text: str, now: datetime | None = None) -> list[KeyEntry]:
    """The entries, in the file's order; none for an empty list.

    Raises:
        KeysError: it is no list of keys, an entry is wrong, or entries contradict each other.
    """
    if len(text) > _LONGEST_TEXT:
        raise KeysError(f"{len(text)} characters, at most {_LONGEST_TEXT} are read")
    try:
        lines, values = _read_nodes(_Loader(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise KeysError(f"{where}not YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise KeysError("nested too deeply") from None
    entries = [_read_entry(value, line) for value, line in zip(values, lines, strict=True)]
    _check_together(entries, lines, now or datetime.now(UTC))
    return entries


def _read_nodes(loader: _Loader) -> tuple[list[int], list[object]]:
    """Every entry's line, counted from 1, and what is there."""
    try:
        root = loader.get_single_node()
        if root is None:
            raise KeysError("the file is empty")
        nodes = _entry_nodes(root)
        _check_doubles(root)
        lines = [node.start_mark.line + 1 for node in nodes]
        return lines, [loader.construct_object(node, deep=True) for node in nodes]
    finally:
        loader.dispose()


def _entry_nodes(root: yaml.Node) -> list[yaml.Node]:
    if not isinstance(root, yaml.MappingNode):
        raise KeysError(f"line {root.start_mark.line + 1}: a mapping with the one key {_ROOT!r} is expected")
    for name, value in root.value:
        if name.value != _ROOT:
            raise KeysError(f"line {name.start_mark.line + 1}: unknown key {name.value!r}, only {_ROOT!r}")
        if not isinstance(value, yaml.SequenceNode):
            raise KeysError(f"line {value.start_mark.line + 1}: {_ROOT} must be a list")
        return value.value
    raise KeysError(f"{_ROOT} is missing")


def _check_doubles(root: yaml.Node) -> None:
    """YAML lets a later value of the same key win, silently: a second `expires` must not."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for name, value in node.value:
                if name.value in seen:
                    raise KeysError(f"line {name.start_mark.line + 1}: {name.value} is given twice")
                seen.add(str(name.value))
                pending.append(value)


def _read_entry(value: object, line: int) -> KeyEntry:
    if not isinstance(value, dict):
        raise KeysError(f"line {line}: a key must be a mapping with name and sha256")
    for name in ("created", "expires"):
        # pydantic would take seconds since 1970 as well
        if value.get(name) is not None and not isinstance(value[name], str):
            raise KeysError(f"line {line}: {name} must be an ISO date-time, got {value[name]!r}")
    try:
        return KeyEntry.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise KeysError(f"line {line}: unknown key {name}") from None
        if first["type"] == "missing":
            raise KeysError(f"line {line}: {name} is missing") from None
        # a key pasted in the hash's place must not end in a log
        got = "" if name == "sha256" else f", got {first['input']!r:.100}"
        raise KeysError(f"line {line}: {name}: {first['msg']}{got}") from None


def _check_together(entries: list[KeyEntry], lines: list[int], now: datetime) -> None:
    by_hash: dict[str, int] = {}
    live: dict[str, list[tuple[int, KeyEntry]]] = {}
    for entry, line in zip(entries, lines, strict=True):
        if entry.sha256 in by_hash:
            raise KeysError(f"line {line}: the sha256 is that of line {by_hash[entry.sha256]} too")
        by_hash[entry.sha256] = line
        if not entry.is_live(now):
            continue
        others = live.setdefault(entry.name, [])
        for other_line, other in others:
            if (other.limits, other.priority) != (entry.limits, entry.priority):
                raise KeysError(
                    f"line {line}: name {entry.name} has other limits or priority than in line {other_line}; "
                    "its keys share them"
                )
        others.append((line, entry))
        if len(others) > MAX_LIVE_KEYS:
            raise KeysError(
                f"line {line}: name {entry.name} has {len(others)} live keys, at most {MAX_LIVE_KEYS} "
                "(the old and the new one of a rotation)"
            )
