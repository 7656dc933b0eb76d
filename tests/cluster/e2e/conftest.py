"""Real server processes on free ports, ended by their recorded pids, and the same model offline."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from hybridserve.replicas.llm import LLM
from hybridserve.replicas.outputs import CompletionOutput
from hybridserve.replicas.sampling_params import SamplingParams

START_S = 120
STOP_S = 60
CONTEXT = 2048

_REPLICAS = ("ingress", "replica")

Offline = Callable[..., list[list[CompletionOutput]]]


def process_table() -> dict[int, tuple[int, str]]:
    """Every process that is no zombie: pid to (parent's pid, time of its start)."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                # it has ended since the folder was listed
                continue
            # the name in brackets may hold anything; what follows it is plain
            state, parent, *rest = stat.rpartition(")")[2].split()
            if state != "Z":
                table[int(entry.name)] = (int(parent), rest[17])
    return table


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class Server:
    """One server process and what it started; `start` after `stop` uses the same port."""

    def __init__(
        self, command: list[str], port: int, log: Path, cwd: Path, environment: Mapping[str, str]
    ) -> None:
        self.command = command
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._cwd = cwd
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._family: dict[int, str] = {}
        """Pids of the process and its descendants, with their times of start."""

    def start(self) -> None:
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                cwd=self._cwd,
                env={**os.environ, **self._environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # pytest itself may run with SIGINT ignored, which a child would inherit
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        self.wait_until_ready()

    def start_if_stopped(self) -> None:
        if self._process is None:
            self.start()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.is_ready():
            assert self._process is not None and self._process.poll() is None, self.tail()
            assert time.monotonic() < deadline, f"not ready within {START_S} s: {self.tail()}"
            time.sleep(0.1)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def pids(self) -> list[int]:
        """The process and all its descendants, now."""
        assert self._process is not None
        table = process_table()
        found = {self._process.pid}
        while more := {pid for pid, (parent, _) in table.items() if parent in found and pid not in found}:
            found |= more
        self._family.update({pid: table[pid][1] for pid in found if pid in table})
        return sorted(found)

    def engine_pid(self) -> int:
        [pid] = [pid for pid in self.pids() if title(pid).startswith("ray::EngineActor")]
        return pid

    def ports_of(self, name: str) -> list[int]:
        """Where processes whose program has a name that begins like this listen."""
        sockets = set()
        for pid in self.pids():
            if title(pid).split(" ")[0].rpartition("/")[2].startswith(name):
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    # some are closed while they are listed
                    with contextlib.suppress(FileNotFoundError):
                        sockets.add(os.readlink(file))
        listening = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                # the state of a socket that listens
                if state == "0A" and f"socket:[{inode}]" in sockets:
                    listening.append(int(local.rpartition(":")[2], 16))
        return listening

    def interrupt(self) -> None:
        """SIGINT, as Ctrl-C sends, and no waiting."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    def wait_for_end(self) -> int:
        """The exit code."""
        assert self._process is not None
        return self._process.wait(STOP_S)

    def stop(self) -> None:
        """SIGINT, as Ctrl-C sends; fails when anything of it outlives that."""
        if self._process is None:
            return
        self.pids()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        deadline = time.monotonic() + 15
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = {pid: title(pid) for pid in left}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        code = self._process.returncode
        self._process = None
        assert not left, f"left behind: {names}"
        assert code is not None and code >= 0, f"ended by signal {code}: {self.tail()}"

    def _left(self) -> list[int]:
        table = process_table()
        return [pid for pid, start in self._family.items() if table.get(pid, (0, ""))[1] == start]

    def lines_of(self, request_id: str) -> list[dict[str, object]]:
        """Our processes' log lines of one request, as far as they have come through Ray."""
        lines = [line[line.index("{") :] for line in self.log.read_text().splitlines() if request_id in line]
        return [json.loads(line[: line.rindex("}") + 1]) for line in lines]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def metrics(self) -> dict[str, float]:
        """Samples added up over ingress replicas and pools' replicas, and once more over pools: the name, and
        what labels are left as name{value,value}."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        sums: dict[str, float] = defaultdict(float)
        for sample in samples:
            labels = {name: value for name, value in sample.labels.items() if name not in _REPLICAS}
            pools = {name: value for name, value in labels.items() if name != "pool"}
            for left in (labels, pools) if "pool" in labels else (labels,):
                sums[sample.name + (f"{{{','.join(left.values())}}}" if left else "")] += sample.value
        return dict(sums)

    def occupancy(self) -> tuple[float, ...]:
        """(running, waiting, units used, pages used)."""
        metrics = self.metrics()
        names = ("requests_running", "requests_waiting", "units_used", "pages_used")
        return tuple(metrics[f"hybridserve_{name}"] for name in names)

    def seconds_until(self, reached: Callable[[tuple[float, ...]], bool], limit: float = 10.0) -> float:
        """How long until `occupancy` is as wanted."""
        began = time.monotonic()
        while not reached(occupancy := self.occupancy()):
            assert time.monotonic() < began + limit, f"after {limit} s still {occupancy}"
            # a scrape takes its time of the server's, too
            time.sleep(0.03)
        return time.monotonic() - began


@pytest.fixture(scope="session")
def new_server(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Iterator[Callable[..., Server]]:
    """new_server(command, port, config="demo.yaml", environment={}, **serving): changed as asked; stopped in
    the end."""
    servers: list[Server] = []

    def make(
        command: Sequence[str],
        port: int,
        config: str = "demo.yaml",
        environment: Mapping[str, str] | None = None,
        **serving: object,
    ) -> Server:
        folder = tmp_path_factory.mktemp("serve")
        content = yaml.safe_load((repo_root / "configs" / config).read_text())
        content["http_options"]["port"] = port
        args = content["applications"][0]["args"]
        args["serving"].update(serving)
        args["logging"] = {"format": "json", "level": "debug"}
        path = folder / config
        path.write_text(yaml.safe_dump(content))
        command = [*command, str(path)]
        servers.append(Server(command, port, folder / "serve.log", repo_root, environment or {}))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(new_server: Callable[..., Server], free_port: Callable[[], int]) -> Server:
    """`serve run`, tokens by the bus; started by `idle`, as another test may have stopped it."""
    command = [sys.executable, "-m", "ray.serve.scripts", "run"]
    # an engine that is killed is replaced as fast as this machine can load a model
    return new_server(command, free_port(), retry_wait_s=START_S)


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client(timeout=60)


@pytest.fixture
def idle(server: Server) -> Iterator[None]:
    """The server runs, and its engine holds nothing before the test and nothing soon after it."""
    server.start_if_stopped()
    nothing = (0.0, 0.0, 0.0, 0.0)
    server.seconds_until(lambda occupancy: occupancy == nothing)
    yield
    server.seconds_until(lambda occupancy: occupancy == nothing)


@pytest.fixture(scope="session")
def llm(demo_model: Path) -> LLM:
    """The same model in this process."""
    return LLM(
        str(demo_model),
        max_model_len=CONTEXT,
        cache_memory_bytes=64 * 2**20,
        num_threads=1,
        show_progress=False,
    )


@pytest.fixture(scope="session")
def offline(llm: LLM) -> Offline:
    """offline(prompts, **sampling): each prompt's answers; prompts that are message lists are chats."""

    def answer(prompts: Sequence[object], **sampling: object) -> list[list[CompletionOutput]]:
        params = SamplingParams(**sampling)
        chats = isinstance(prompts[0], list) and isinstance(prompts[0][0], dict)
        outputs = (llm.chat if chats else llm.generate)(prompts, params, use_tqdm=False)
        return [output.outputs for output in outputs]

    return answer
