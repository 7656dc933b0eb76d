"""`hybridserve keys`: who may use a server, in a file of hashes that running servers read by themselves."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hybridserve.cluster.access import key_edit
from hybridserve.cluster.access.keys import KeyEntry, KeyLimits

keys = typer.Typer(help="Make, list, rotate and revoke API keys.", no_args_is_help=True)

_UNITS = {"m": "minutes", "h": "hours", "d": "days"}

File = Annotated[Path, typer.Argument(help="The file that access.keys_file names.", metavar="FILE")]
Name = Annotated[str, typer.Argument(help="Whose key: a person, a team, a program.", metavar="NAME")]
ExpiresIn = Annotated[
    str | None, typer.Option(help="Lifetime of the new key, like 90d or 12h; by default for ever.")
]


@keys.command("add")
def add(
    file: File,
    name: Name,
    expires_in: ExpiresIn = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Of prompts and answers together.")
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None,
    priority: Annotated[str, typer.Option(help="The highest it may ask for: high, normal or low.")] = "high",
) -> None:
    """Make a key for a new name, and print it: this once, as only its hash is kept."""
    now = _now()
    limits = KeyLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
    )
    typer.echo(key_edit.add(file, name, now, expires=_end(now, expires_in), limits=limits, priority=priority))


@keys.command("rotate")
def rotate(
    file: File,
    name: Name,
    grace: Annotated[str, typer.Option(help="How long the old key is valid beside it.")] = "7d",
    expires_in: ExpiresIn = None,
) -> None:
    """Make a second key for a name, and print it; the first ends after the grace period.

    The new key has the old one's limits, and its lifetime if no other is given.
    """
    now = _now()
    typer.echo(key_edit.rotate(file, name, now, grace=_span("--grace", grace), expires=_end(now, expires_in)))


@keys.command("revoke")
def revoke(
    file: File,
    name: Name,
    key_id: Annotated[
        str | None, typer.Option("--id", help="The one key that `list` shows with this id.")
    ] = None,
) -> None:
    """Take a name's keys out of the file; running servers refuse them within about a second."""
    for entry in key_edit.revoke(file, name, _now(), key_id=key_id):
        typer.echo(f"revoked {entry.name} {entry.key_id}")


@keys.command("list")
def list_keys(file: File) -> None:
    """Show every key's name, id, dates and limits."""
    now = _now()
    table = Table("name", "id", "state", "created", "expires", "priority", box=box.SIMPLE_HEAD)
    table.add_column("limits", overflow="fold")
    for one in key_edit.load(file):
        state = "live" if one.is_live(now) else "expired"
        created, expires = _shown(one.created), _shown(one.expires)
        table.add_row(one.name, one.key_id, state, created, expires, one.priority, _limits(one))
    Console().print(table)


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _end(now: datetime, span: str | None) -> datetime | None:
    return None if span is None else now + _span("--expires-in", span)


def _span(option: str, text: str) -> timedelta:
    """90d, 12h or 30m."""
    number, unit = text[:-1], text[-1:]
    if (
        unit not in _UNITS
        or not (number.isascii() and number.isdigit())
        or len(number) > 5
        or not int(number)
    ):
        raise ValueError(
            f"{option} must be a number of days, hours or minutes, like 90d, 12h or 30m; got {text!r}"
        )
    return timedelta(**{_UNITS[unit]: int(number)})


def _shown(moment: datetime | None) -> str:
    return "-" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _limits(entry: KeyEntry) -> str:
    """One a line, as a terminal may be narrow."""
    limits = entry.limits
    lines = (
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.max_concurrent, "at once"),
    )
    return "\n".join(f"{value} {what}" for value, what in lines if value is not None) or "-"
