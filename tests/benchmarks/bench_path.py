"""The whole path of a token with a fake engine, one token a stream a step of 5 ms, by mode of the path.

    python tests/benchmarks/bench_path.py [--rounds 2] [--seconds 5] [--json out.json]

Modes: Serve's proxy with handle streaming, Serve's proxy with the token bus, HAProxy with the token bus, and
"bare", the same application under uvicorn alone. A round starts each in turn, so that what else the machine
does falls on all of them. The client is a process of its own that counts tokens in the bytes that come.

Beside what was measured stands the CPU time of each process a token, read from /proc, which other load hardly
changes; from it follows how many tokens a second two cores could carry that had nothing else to do. Figures
are medians over the rounds.
"""

import argparse
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent / "path"
MODES = ("bare", "serve/handle", "serve/bus", "haproxy/bus")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CORES = 2
MANY_PLACES = 1024
# by the titles that Ray gives its processes
ROLES = (
    ("ray::ServeReplica:bench:ingress", "ingress"),
    ("ray::ServeReplica", "pool replica"),
    ("ray::EngineActor", "engine"),
    ("ray::ProxyActor", "proxy"),
    ("haproxy", "proxy"),
    ("path/server.py bare", "ingress"),
)


class Child:
    """A Python program that is talked to by lines."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(FOLDER / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        )

    def line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")
        return line

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def running(program: str, *arguments: str) -> Iterator[Child]:
    child = Child(program, *arguments)
    try:
        yield child
    finally:
        child.close()


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU time so far by role, of a process and its descendants."""
    parents, times = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                # it has ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
            times[int(entry.name)] = (title, (int(fields[11]) + int(fields[12])) * TICK_S)
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    roles: dict[str, float] = defaultdict(float)
    for pid in family & times.keys():
        title, seconds = times[pid]
        roles[next((role for name, role in ROLES if name in title), "rest of Ray")] += seconds
    return roles


def measure_rate(client: Child, server: Child, streams: int, seconds: float) -> dict[str, object]:
    ask(client, job="rate", streams=streams, seconds=seconds)
    client.line()
    before = cpu_seconds(server.process.pid)
    result = json.loads(client.line())
    after = cpu_seconds(server.process.pid)
    tokens = result["tokens"]
    used = {role: (after[role] - before.get(role, 0.0)) / tokens * 1e6 for role in after}
    used["client"] = result["client_cpu_s"] / tokens * 1e6
    return {
        "tokens/s": tokens / result["seconds"],
        "tokens an event": tokens / result["events"],
        "us a token": used,
        "tokens/s of two idle cores": CORES * 1e6 / sum(used.values()),
    }


def ask(client: Child, **job: object) -> None:
    client.process.stdin.write(json.dumps(job) + "\n")
    client.process.stdin.flush()


def milliseconds(client: Child, **job: object) -> float:
    ask(client, **job)
    return json.loads(client.line())["ms"]


@contextmanager
def server_and_client(mode: str, replicas: int, places: int) -> Iterator[tuple[Child, Child]]:
    """Both running, and warm."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with running("server.py", mode, port, str(replicas), str(places)) as server:
        while server.line() != "ready\n":
            continue
        with running("client.py", port) as client:
            milliseconds(client, job="alone", requests=20)
            yield server, client


def measure(mode: str, args: argparse.Namespace) -> dict[str, object]:
    """One round of one mode."""
    with server_and_client(mode, args.replicas, MANY_PLACES) as (server, client):
        # beside its engine in one process, the bare application's rate would be that of a lock
        counts = [] if mode == "bare" else args.streams
        found = {f"{n} streams": measure_rate(client, server, n, args.seconds) for n in counts}
        # cancelled streams take a moment to be gone
        time.sleep(1.0)
        starts = [milliseconds(client, job="first_token", streams=64) for _ in range(args.starts)]
        alone = milliseconds(client, job="alone", requests=args.requests)
    return {**found, "ms to first token, 64 at once": statistics.median(starts), "ms alone": alone}


def measure_flood(mode: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """As many as there are places at once, then ten times as many, in turn."""
    found = []
    with server_and_client(mode, args.replicas, args.flood) as (_, client):
        for _ in range(args.starts):
            alone = milliseconds(client, job="first_token", streams=args.flood // 2)
            time.sleep(1.0)
            ask(client, job="flood", streams=10 * args.flood)
            found.append(
                {"as many as half the places: ms to first token": alone, **json.loads(client.line())}
            )
            time.sleep(1.0)
            print(f"{mode}: " + ", ".join(f"{name} {value:.0f}" for name, value in found[-1].items()))
    return found


def medians(rounds: list[object]) -> object:
    """Of equally shaped results."""
    if isinstance(rounds[0], dict):
        keys = {key: None for one in rounds for key in one}
        return {key: medians([one[key] for one in rounds if key in one]) for key in keys}
    return statistics.median(rounds)


def show(results: dict[str, dict[str, object]], streams: list[int], heading: str) -> None:
    table = Table(title=heading)
    for column in ("", *results):
        table.add_column(column, justify="right" if column else "left")
    for n in streams:
        by_mode = [result.get(f"{n} streams") for result in results.values()]
        for name in ("tokens/s", "tokens an event", "tokens/s of two idle cores"):
            digits = 2 if name == "tokens an event" else 0
            cells = (f"{one[name]:,.{digits}f}" if one else "" for one in by_mode)
            table.add_row(f"{n} streams: {name}", *cells)
        roles = {role: None for one in by_mode if one for role in one["us a token"]}
        for role in roles:
            cells = (f"{one['us a token'].get(role, 0):.1f}" if one else "" for one in by_mode)
            table.add_row(f"  us a token, {role}", *cells)
    for name in ("ms to first token, 64 at once", "ms alone"):
        table.add_row(name, *(f"{result[name]:.1f}" for result in results.values()))
    Console(width=120).print(table)


def show_flood(mode: str, floods: list[dict[str, float]]) -> None:
    table = Table(title=f"{mode}, medians of {len(floods)}, load average {os.getloadavg()[0]:.1f}")
    table.add_column("")
    table.add_column("", justify="right")
    for name in floods[0]:
        table.add_row(name, f"{statistics.median(one[name] for one in floods):,.0f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 64])
    parser.add_argument("--starts", type=int, default=5, help="times that 64 streams begin at once")
    parser.add_argument("--requests", type=int, default=200, help="of one client alone")
    parser.add_argument("--replicas", type=int, default=1, help="ingress replicas")
    parser.add_argument("--flood", type=int, metavar="PLACES", help="only floods of ten times as many")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.flood:
        for mode in args.modes:
            show_flood(mode, measure_flood(mode, args))
        return
    rounds: dict[str, list[object]] = defaultdict(list)
    for _ in range(args.rounds):
        for mode in args.modes:
            began = time.monotonic()
            rounds[mode].append(measure(mode, args))
            print(f"{mode}: {time.monotonic() - began:.0f} s, load average {os.getloadavg()[0]:.1f}")
    results = {mode: medians(found) for mode, found in rounds.items()}
    heading = (
        f"{datetime.date.today()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, "
        f"{args.replicas} ingress replica(s), medians of {args.rounds} rounds of {args.seconds:g} s"
    )
    show(results, args.streams, heading)
    if args.json:
        args.json.write_text(json.dumps({"heading": heading, "results": results, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
