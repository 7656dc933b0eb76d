"""Where a run took place: devices and their links, versions, and the switches that change the result."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "MKL_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF")
_PACKAGES = ("torch", "triton", "ray", "numpy")
_COMMAND_TIMEOUT_S = 20


def describe_environment(backend: str, device: torch.device) -> dict[str, Any]:
    """Of this process's machine. Values that cannot be found out say why, in words."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": versions(),
        "switches": switches(os.environ),
        **({"gpu": _describe_gpus(device)} if backend == "nccl" else {}),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def switches(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that libraries of communication and threads read."""
    names = [name for name in environ if name.startswith(_PREFIXES) or name in _NAMES]
    return {name: environ[name] for name in sorted(names)}


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _describe_gpus(device: torch.device) -> dict[str, Any]:
    count = torch.cuda.device_count()
    peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    return {
        "name": torch.cuda.get_device_name(device),
        "visible": count,
        "peer_access": peers,
        "topology": _command("nvidia-smi", "topo", "-m"),
        "nvlink": _command("nvidia-smi", "nvlink", "--status", "-i", str(device.index or 0)),
    }


def _command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(words)}: {error}"
    return (done.stdout or done.stderr).strip()
