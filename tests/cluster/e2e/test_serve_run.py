"""A real `serve run` of the demo model, asked over HTTP by the openai client."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]
START_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"not ready within {START_S} s: {log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address; the process runs in the repository's root, as the README says."""
    folder = tmp_path_factory.mktemp("serve")
    port = free_port()
    config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    config["http_options"]["port"] = port
    path = folder / "demo.yaml"
    path.write_text(yaml.safe_dump(config))
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(path)],
            cwd=ROOT,
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # pytest itself may run with SIGINT ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="def add(a, b):", max_tokens=8, temperature=0)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.choices[0].text
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 8


def test_streaming_says_the_same(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "prompt": "import os\n", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    pieces = [
        part.choices[0].text for part in client.completions.create(**asked, stream=True) if part.choices
    ]
    assert "".join(pieces) == whole
    assert len(pieces) > 2


def test_what_the_engine_refuses_is_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model="demo", prompt=[8192], max_tokens=4)
