"""What serving over HTTP adds to the engine: time to the first token, time per token, many clients, start-up.

    python tests/benchmarks/bench_http.py [--config configs/demo.yaml] [--threads N] [--json out.json]
    python tests/benchmarks/bench_http.py --config tests/benchmarks/serve/h200-9b.yaml --clients 256 \
        --client-prompt-tokens 512 --new-tokens 129 512 --prompt-tokens 512 8192

Starts `hybridserve serve` on a free port, and beside it the same engine (built by the server's own factory
from the same settings, so with the same threads and waiting) in a process of its own, without HTTP or Ray. A
sample asks first one and then the other for the same new prompt, after the same pause; medians are compared.
The client keeps one connection, and its clock runs from the request to the first event with text. The
engine's clock runs from the request to the end of the step that made the first token. Prompts go to both as
text, as to the offline API, so both pay for tokenising. The many clients are streams in processes of their
own that begin at once, as the engine's requests do, with prompts of random ids; both clocks run to the last
token. Both engines share the device, one of them idle, so on a GPU the config's `cache_memory` must leave
room for two. Run it on an otherwise idle machine.

Every row is printed, and the JSON file written anew, as soon as it is measured.
"""

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import aiohttp
import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from serve.client import Target  # noqa: E402
from serve.crowd import Crowd  # noqa: E402
from serve.servers import free_port, running_server  # noqa: E402

from hybridserve.cluster.cli.serve import ServeFile, read_serve_file  # noqa: E402
from hybridserve.cluster.pool.engine_factory import CheckpointEngine  # noqa: E402
from hybridserve.replicas.engine.config import EngineConfig  # noqa: E402
from hybridserve.replicas.sampling_params import SamplingParams  # noqa: E402
from hybridserve.replicas.text.tokenizer import Tokenizer  # noqa: E402

PAUSE_S = 0.1
Row = dict[str, float]


def engine_process(config: EngineConfig, tokenizer_path: str, pipe: Connection) -> None:
    """Answer prompts that come at once with seconds to the first token of any, and of all later steps."""
    tokenizer = Tokenizer.load(tokenizer_path)
    engine = CheckpointEngine(config)().engine
    pipe.send("ready")
    while (ask := pipe.recv()) is not None:
        prompts, max_tokens = ask
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            engine.add_request(f"bench-{index}", token_ids, params)
        while not engine.step():
            continue
        first = time.perf_counter()
        while engine.has_unfinished():
            engine.step()
        pipe.send((first - began, time.perf_counter() - first))


@contextmanager
def running_engine(config: EngineConfig, tokenizer_path: str) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine_process, args=(config, tokenizer_path, theirs), daemon=True)
    process.start()
    assert ours.recv() == "ready"
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


class Client:
    """Streams completions of one server."""

    def __init__(self, file: ServeFile) -> None:
        self._path = f"{file.url}/v1/completions"
        self._model = file.settings.model.served_name

    async def stream(self, http: aiohttp.ClientSession, prompt: str, max_tokens: int) -> list[float]:
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
        async with http.post(self._path, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    arrivals.append(time.perf_counter() - began)
        return arrivals


class Prompts:
    """New prompts of about a given number of tokens: shuffled lines of this repository's own code."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        folder = Path(__file__).resolve().parents[2]
        files = sorted((folder / "replicas").rglob("*.py"))
        self._lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        self._ids = [one for one in range(tokenizer.vocab_size) if not tokenizer.is_special(one)]
        self._random = random.Random(0)

    def make(self, num_tokens: int) -> str:
        """A text of `num_tokens`, or one or two fewer where its end merges anew."""
        # a line has several tokens whatever the vocabulary
        count = min(len(self._lines), 8 + num_tokens // 3)
        lines = self._random.sample(self._lines, count)
        return self.tokenizer.decode(self.tokenizer.encode("".join(lines))[:num_tokens])

    def make_ids(self, num_tokens: int) -> list[int]:
        """Exactly so many ordinary tokens, at random."""
        return self._random.choices(self._ids, k=num_tokens)


def one_connection() -> aiohttp.ClientSession:
    """aiohttp's, as it costs less than httpx, and what the client costs is measured too."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120))


def ask_engine(
    engine: Connection, prompts: Sequence[str | list[int]], max_tokens: int
) -> tuple[float, float]:
    """Seconds to the first token of any prompt, and of all later steps."""
    engine.send((prompts, max_tokens))
    return engine.recv()


async def measure_first_token(
    client: Client, engine: Connection, prompts: Prompts, num_tokens: int, samples: int
) -> Row:
    offline, online = [], []
    async with one_connection() as http:
        for sample in range(samples + 3):
            text = prompts.make(num_tokens)
            await asyncio.sleep(PAUSE_S)
            alone, _ = ask_engine(engine, [text], 1)
            await asyncio.sleep(PAUSE_S)
            arrivals = await client.stream(http, text, 1)
            # the first few warm caches and connections
            if sample >= 3:
                offline.append(alone * 1e3)
                online.append(arrivals[0] * 1e3)
    engine_ms, http_ms = statistics.median(offline), statistics.median(online)
    return {"engine": engine_ms, "http": http_ms, "added": http_ms - engine_ms}


async def measure_one_client(
    client: Client, engine: Connection, prompts: Prompts, new_tokens: int, rounds: int
) -> Row:
    """Milliseconds a token."""
    alone, single = [], []
    async with one_connection() as http:
        for _ in range(rounds):
            text = prompts.make(48)
            _, seconds = ask_engine(engine, [text], new_tokens)
            alone.append(seconds / (new_tokens - 1) * 1e3)
            arrivals = await client.stream(http, text, new_tokens)
            # an event may hold no text of its own or several tokens': time counts, not events
            single.append((arrivals[-1] - arrivals[0]) / (new_tokens - 1) * 1e3)
    ms, http_ms = statistics.median(alone), statistics.median(single)
    return {"engine": ms, "http": http_ms, "added": http_ms - ms}


def measure_crowd(
    crowd: Crowd, engine: Connection, prompts: Prompts, shape: tuple[int, int, int], rounds: int
) -> Row:
    """Tokens/s of answers from all requests at once to the last token. shape: clients, prompt, new tokens."""
    clients, length, new_tokens = shape

    def batch() -> list[list[int]]:
        return [prompts.make_ids(length) for _ in range(clients)]

    # neither the first batch of its size nor a server's first connections are what is measured
    ask_engine(engine, batch(), 4)
    crowd.send(batch(), 4)
    alone, served, firsts, joined = [], [], [], []
    for _ in range(rounds):
        alone.append(clients * new_tokens / sum(ask_engine(engine, batch(), new_tokens)))
        found = crowd.send(batch(), new_tokens)
        served.append(found.tokens / found.seconds)
        firsts.append(statistics.median(found.first_token_s) * 1e3)
        joined.append(found.tokens_per_event)
    rate, http_rate = statistics.median(alone), statistics.median(served)
    return {
        "engine": rate,
        "http": http_rate,
        "added": http_rate - rate,
        "share": http_rate / rate,
        "least share": min(one / other for one, other in zip(served, alone, strict=True)),
        "median ms to first token": statistics.median(firsts),
        "tokens an event": statistics.median(joined),
    }


async def measure(
    file: ServeFile, engine: Connection, args: argparse.Namespace
) -> AsyncIterator[tuple[str, Row]]:
    """Names and rows, as they are measured."""
    client, prompts = Client(file), Prompts(Tokenizer.load(file.settings.model.tokenizer_path))
    rounds = args.rounds or max(3, args.samples // 6)
    for length in args.prompt_tokens:
        name = f"ms to first token, prompt of {length}"
        yield name, await measure_first_token(client, engine, prompts, length, args.samples)
    yield (
        "ms a token, 1 client",
        await measure_one_client(client, engine, prompts, args.new_tokens[0], rounds),
    )
    with Crowd(Target(file.url, file.settings.model.served_name), args.clients) as crowd:
        for new_tokens in args.new_tokens:
            name = f"tokens/s, {args.clients} clients, {args.client_prompt_tokens} + {new_tokens} tokens"
            shape = (args.clients, args.client_prompt_tokens, new_tokens)
            # the crowd has processes of its own, and nothing else goes on here
            yield name, measure_crowd(crowd, engine, prompts, shape, rounds)


def device_of(file: ServeFile) -> Literal["cpu", "cuda"]:
    """Where the server's engine runs, by the config or what this machine has."""
    if file.settings.serving.device != "auto":
        return file.settings.serving.device
    # only to look: the engines have processes of their own
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


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


class Report:
    """Rows as they come: a line each, and the JSON file anew."""

    def __init__(self, heading: str, path: Path | None) -> None:
        self._heading = heading
        self._path = path
        self._rows: dict[str, Row] = {}
        print(heading, flush=True)

    def add(self, name: str, row: Row) -> None:
        self._rows[name] = row
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
        if self._path:
            self._path.write_text(json.dumps({"heading": self._heading, "rows": self._rows}, indent=1))

    def show(self) -> None:
        table = Table(title=self._heading)
        for column in ("what", "engine alone", "over HTTP", "added"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for name, row in self._rows.items():
            cells = (f"{row[key]:,.1f}" if key in row else "" for key in ("engine", "http", "added"))
            table.add_row(name, *cells)
        Console(width=110).print(table)


async def measure_all(file: ServeFile, engine: Connection, args: argparse.Namespace, report: Report) -> None:
    async for name, row in measure(file, engine, args):
        report.add(name, row)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    parser.add_argument("--threads", type=int, help="serving.num_threads, instead of the config's")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[48, 512])
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--clients", type=int, default=16, help="that stream at once")
    parser.add_argument("--client-prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64], help="of an answer; a row each")
    parser.add_argument("--rounds", type=int, help="of the rows of tokens; by default a sixth of --samples")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def main() -> None:
    args = options().parse_args()
    heading = (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"num_threads {args.threads or 'default'}, medians of {args.samples}"
    )
    with with_threads(args.config, args.threads) as config:
        port = free_port()
        file = read_serve_file(config, port)
        report = Report(heading, args.json)
        # the server comes first: what it takes to be ready is measured on a machine at rest
        with running_server(config, port, file.url) as ready_s:
            report.add("seconds from `serve` to ready", {"http": ready_s})
            config = file.settings.engine_config(device_of(file))
            with running_engine(config, file.settings.model.tokenizer_path) as engine:
                asyncio.run(measure_all(file, engine, args, report))
    report.show()


if __name__ == "__main__":
    main()
