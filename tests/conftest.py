"""The environment every test runs in, set before anything imports torch, transformers or ray."""

import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# the same examples in every run, so that a change's tests fail by the change; `search` looks for new ones.
# how long an example takes says nothing where several processes share the cores
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

os.environ.update(
    # a local test cluster needs no tokens, and no test may reach for the network
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    HF_HUB_OFFLINE="1",
    # or tests that compute, beside those of Ray, would leave its workers next to nothing of the cores
    RAY_worker_niceness="0",
    # on a machine that is busy a proxy takes longer than Serve would wait before it kills it
    RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="120",
    RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S="60",
    # one thread a process: tests start several processes on few cores
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    # nobody outside is called: each new HTTP client would read the machine's list of authorities, which takes
    # 50 ms where the environment names one
    SSL_CERT_DIR=str(Path(__file__).parent),
)
os.environ.pop("SSL_CERT_FILE", None)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def demo_model(repo_root: Path) -> Path:
    """Folder of the demo checkpoint."""
    return repo_root / "configs" / "demo-model"


# above what Ray gives its workers (10002 to 19999), below what the system gives who asks for any port: with
# either, a port that is free now may be another process' by the time a server has started
_PORTS = range(20000, 32768)


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """free_port(): of this machine, never the same twice."""
    untried = random.SystemRandom().sample(_PORTS, len(_PORTS))

    def find() -> int:
        while untried:
            port = untried.pop()
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            return port
        pytest.fail(f"no port of {_PORTS} is free")

    return find


RANK_TIMEOUT_S = 120


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory) -> Iterator[Callable[..., list[Any]]]:
    """on_ranks(tp_size, file, function, **arguments): what `function(group, **arguments)` of a Python file
    returns on each rank of a gloo group. The processes stay for the next call (see `rank_host.py`)."""
    command = [sys.executable, str(Path(__file__).with_name("rank_host.py"))]
    command.append(str(tmp_path_factory.mktemp("rank_stores")))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:

        def run(tp_size: int, file: Path, function: str, **arguments: object) -> list[Any]:
            pickle.dump((tp_size, str(file), function, arguments), host.stdin)
            host.stdin.flush()
            if not select.select([host.stdout], [], [], RANK_TIMEOUT_S)[0]:
                host.kill()
                pytest.fail(f"{function} on {tp_size} ranks did not end within {RANK_TIMEOUT_S} s")
            answers = pickle.load(host.stdout)
            errors = [f"rank {rank}: {error}" for rank, (well, error) in enumerate(answers) if not well]
            assert not errors, "\n".join(errors)
            return [result for _, result in answers]

        try:
            yield run
        finally:
            host.stdin.close()


# what starts Ray: several instances at once take the cores from each other, and from their tests' deadlines
_WITH_RAY = (
    "tests/cluster/e2e/",
    "tests/cluster/pool/test_ingress_replicas.py",
    "tests/cluster/pool/test_replica.py",
    "tests/cluster/pool/test_serve_hooks.py",
    "tests/cluster/pool/test_shards.py",
    "tests/cluster/rollout/",
    "tests/cluster/serve_alpha/test_spare_workers.py",
    "tests/cluster/survival/test_survival.py",
    "tests/cluster/test_comm_benchmark.py",
    "tests/packaging/test_ray_actor.py",
)
# on a GPU most of their time is compilation, minutes a file
_COMPILING = ("tests/kernels/triton/", "tests/replicas/test_cuda.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (pytest-xdist), a file's tests share one, and all that start Ray share one.

    On a GPU tests that compile go to any.
    """
    import torch
    from xdist.scheduler import LoadScopeScheduling

    alone = _COMPILING if torch.cuda.is_available() else ()

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(alone):
                return nodeid
            return "ray" if nodeid.startswith(_WITH_RAY) else nodeid.partition("::")[0]

    return Scheduling(config, log)


def pytest_configure() -> None:
    """Without a GPU, Triton's kernels run in its interpreter; it must know before it is imported."""
    # tests send themselves Ctrl-C and hang up, which are ignored behind a shell's `&` and behind nohup
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
