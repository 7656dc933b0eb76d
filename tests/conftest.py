"""The environment every test runs in, set before anything imports torch, transformers or ray."""

import os
from pathlib import Path

import pytest

os.environ.update(
    # a local test cluster needs no tokens, and no test may reach for the network
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    HF_HUB_OFFLINE="1",
    # one thread a process: tests start several processes on few cores
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def demo_model(repo_root: Path) -> Path:
    """Folder of the demo checkpoint."""
    return repo_root / "configs" / "demo-model"


def pytest_configure() -> None:
    """Without a GPU, Triton's kernels run in its interpreter; it must know before it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
