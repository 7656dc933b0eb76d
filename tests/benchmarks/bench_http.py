"""What serving over HTTP adds to the engine: time to the first token, time per token, 16 clients, start-up.

    python tests/benchmarks/bench_http.py [--config configs/demo.yaml] [--threads N] [--json out.json]

Starts `hybridserve serve` on a free port, and beside it the same engine (built by the server's own factory
from the same settings, so with the same threads and waiting) in a process of its own, without HTTP or Ray. A
sample asks first one and then the other for the same new prompt, after the same pause; medians are compared.
The client keeps one connection, and its clock runs from the request to the first event with text. The
engine's clock runs from the request to the end of the step that made the first token. Prompts go as text, so
that HTTP pays for tokenising. Run it on an otherwise idle machine.
"""

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from hybridserve.cluster.cli.serve import ServeFile, read_serve_file
from hybridserve.cluster.pool.engine_factory import CheckpointEngine
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.tokenizer import Tokenizer

NEW_TOKENS = 64
CLIENTS = 16
PAUSE_S = 0.1
READY_TIMEOUT_S = 120.0


def engine_process(config: EngineConfig, pipe: Connection) -> None:
    """Answer each prompt with (seconds to its first token, seconds of the later steps, their tokens)."""
    engine = CheckpointEngine(config)().engine
    pipe.send("ready")
    while (ask := pipe.recv()) is not None:
        prompt, max_tokens = ask
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        began = time.perf_counter()
        engine.add_request("bench", prompt, params)
        while not engine.step():
            continue
        first = time.perf_counter()
        while engine.has_unfinished():
            engine.step()
        pipe.send((first - began, time.perf_counter() - first, max_tokens - 1))


@contextmanager
def running_engine(config: EngineConfig) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine_process, args=(config, theirs), daemon=True)
    process.start()
    assert ours.recv() == "ready"
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


@contextmanager
def running_server(config: Path, port: int, url: str) -> Iterator[float]:
    """Seconds from starting `hybridserve serve` until it is ready."""
    command = "import sys; from hybridserve.cluster.cli.main import main; sys.exit(main())"
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", command, "serve", str(config), "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not answers(url):
                if process.poll() is not None or time.monotonic() > began + READY_TIMEOUT_S:
                    log.seek(0)
                    raise SystemExit(f"the server did not start:\n{log.read().decode(errors='replace')}")
                time.sleep(0.1)
            yield time.monotonic() - began
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


class Client:
    """Streams completions of one server."""

    def __init__(self, file: ServeFile) -> None:
        self._path = f"{file.url}/v1/completions"
        self._model = file.settings.model.served_name

    async def stream(self, http: httpx.AsyncClient, prompt: str, max_tokens: int) -> list[float]:
        """When each event with a choice arrived, in seconds since the request."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        arrivals = []
        began = time.perf_counter()
        async with http.stream("POST", self._path, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    arrivals.append(time.perf_counter() - began)
        return arrivals


class Prompts:
    """New prompts of about a given number of tokens: shuffled lines of this repository's own code."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        folder = Path(__file__).resolve().parents[2]
        files = sorted((folder / "replicas").rglob("*.py"))
        self._lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        self._random = random.Random(0)

    def make(self, num_tokens: int) -> tuple[str, list[int]]:
        """A text and its token ids, cut at `num_tokens` (cut again where the text's end merges anew)."""
        lines = self._random.sample(self._lines, min(len(self._lines), num_tokens))
        text = self.tokenizer.decode(self.tokenizer.encode("".join(lines))[:num_tokens])
        return text, self.tokenizer.encode(text)


async def measure_first_token(
    client: Client, engine: Connection, prompts: Prompts, num_tokens: int, samples: int
) -> dict[str, float]:
    offline, online = [], []
    async with httpx.AsyncClient(timeout=60) as http:
        for sample in range(samples + 3):
            text, token_ids = prompts.make(num_tokens)
            await asyncio.sleep(PAUSE_S)
            engine.send((token_ids, 1))
            alone = engine.recv()[0]
            await asyncio.sleep(PAUSE_S)
            arrivals = await client.stream(http, text, 1)
            # the first few warm caches and connections
            if sample >= 3:
                offline.append(alone * 1e3)
                online.append(arrivals[0] * 1e3)
    engine_ms, http_ms = statistics.median(offline), statistics.median(online)
    return {"engine": engine_ms, "http": http_ms, "added": http_ms - engine_ms}


async def measure_tokens(
    client: Client, engine: Connection, prompts: Prompts, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds a token of one client, and tokens/s of 16."""
    alone, single, many = [], [], []
    async with httpx.AsyncClient(timeout=120) as http:
        for _ in range(rounds):
            text, token_ids = prompts.make(48)
            engine.send((token_ids, NEW_TOKENS))
            _, seconds, tokens = engine.recv()
            alone.append(seconds / tokens * 1e3)
            arrivals = await client.stream(http, text, NEW_TOKENS)
            # an event may hold no text of its own or several tokens': time counts, not events
            single.append((arrivals[-1] - arrivals[0]) / (NEW_TOKENS - 1) * 1e3)
            texts = [prompts.make(64)[0] for _ in range(CLIENTS)]
            began = time.perf_counter()
            await asyncio.gather(*(client.stream(http, text, NEW_TOKENS) for text in texts))
            many.append(CLIENTS * NEW_TOKENS / (time.perf_counter() - began))
    ms, http_ms = statistics.median(alone), statistics.median(single)
    return {
        "ms a token, 1 client": {"engine": ms, "http": http_ms, "added": http_ms - ms},
        f"tokens/s, {CLIENTS} clients": {"http": statistics.median(many)},
    }


async def measure(
    file: ServeFile, engine: Connection, lengths: list[int], samples: int
) -> dict[str, dict[str, float]]:
    client, prompts = Client(file), Prompts(Tokenizer.load(file.settings.model.path))
    rows = {}
    for length in lengths:
        name = f"ms to first token, prompt of {length}"
        rows[name] = await measure_first_token(client, engine, prompts, length, samples)
    return {**rows, **await measure_tokens(client, engine, prompts, max(3, samples // 6))}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def with_threads(config: Path, threads: int | None) -> Iterator[Path]:
    """The config, with `serving.num_threads` set when `threads` is."""
    if threads is None:
        yield config
        return
    content = yaml.safe_load(config.read_text())
    content["applications"][0]["args"].setdefault("serving", {})["num_threads"] = threads
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / config.name
        written.write_text(yaml.safe_dump(content))
        yield written


def show(rows: dict[str, dict[str, float]], heading: str) -> None:
    table = Table(title=heading)
    for column in ("what", "engine alone", "over HTTP", "added"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, row in rows.items():
        cells = (f"{row[key]:.1f}" if key in row else "" for key in ("engine", "http", "added"))
        table.add_row(name, *cells)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--threads", type=int, help="serving.num_threads, instead of the config's")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[48, 512])
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with with_threads(args.config, args.threads) as config:
        port = free_port()
        file = read_serve_file(config, port)
        # the server comes first: what it takes to be ready is measured on a machine at rest
        with (
            running_server(config, port, file.url) as ready_s,
            running_engine(file.settings.engine_config("cpu")) as engine,
        ):
            rows = {"seconds from `serve` to ready": {"http": ready_s}}
            rows |= asyncio.run(measure(file, engine, args.prompt_tokens, args.samples))
    heading = (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"num_threads {args.threads or 'default'}, medians of {args.samples}"
    )
    show(rows, heading)
    if args.json:
        args.json.write_text(json.dumps({"heading": heading, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
