"""Where the time of a step goes: by part of the model and by kernel, from torch's profiler.

Parts are marked by wrapping methods of the modules' classes while a profile is taken, as the model's layers
take no hooks. A captured graph has no parts, so profiled steps run without graphs: kernels take the time they
take there, gaps between them do not. On a CPU there are no kernels, and a part's time is its call's.
"""

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rows import NO_END, Sizes, mixed_lengths
from session import Session, greedy
from torch import nn

import hybridserve.kernels

MARK = "part: "
METHODS = ("__call__", "project_in", "mix", "project_out")
"""Of a part: a mixer has the last three."""
REST = "sampling, feedback and the rest"
KINDS = (
    ("library GEMM", r"gemm|nvjet|cutlass|xmma|splitK|cublas"),
    ("library attention", r"flash|fmha|sdpa|cudnn"),
    ("copies and fills", r"^Mem(cpy|set)"),
    ("torch", r"at::|at_cuda|cub::|elementwise|reduce_kernel"),
)


def profile_decode(s: Session, batch: int, length: int) -> dict[str, Any]:
    """One decode step of `batch` sequences of `length` tokens."""
    requests = [s.add(prompt, greedy(NO_END)) for prompt in s.prompts(batch, length)]
    s.run_until_started(requests)
    with _without_graphs(s):
        # the first step outside graphs may compile
        for _ in range(3):
            s.step()
        found = _profiled(s, s.step)
    s.abort(requests)
    return found


def profile_prefill(s: Session, length: int) -> dict[str, Any]:
    """The steps of one prompt of `length` tokens."""
    prompt = s.prompt(length)
    with _without_graphs(s):
        s.generate([s.prompt(length)], greedy(1))
        return _profiled(s, lambda: s.generate([prompt], greedy(1)))


def profile_mixed(s: Session, sizes: Sizes) -> dict[str, Any]:
    """Some steps of the mixed requests, from when half of them have their first token."""
    lens, outs = mixed_lengths(s, sizes)
    requests = [s.add(s.prompt(length), greedy(n)) for length, n in zip(lens, outs, strict=True)]
    started: set[str] = set()
    while len(started) < len(requests) // 2:
        started |= {one.request_id for one in s.step() if one.token_ids}

    def steps() -> None:
        for _ in range(sizes.profile_steps):
            s.step()

    with _without_graphs(s):
        s.step()
        found = _profiled(s, steps)
    s.abort(requests)
    return found


def _profiled(s: Session, call: Callable[[], object]) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if s.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    s.wait()
    with _marked(s.engine._executor._model), torch.profiler.profile(activities=activities) as profile:
        call()
        s.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return summarise(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


@contextmanager
def _without_graphs(s: Session) -> Iterator[None]:
    runner = s.engine._executor
    graphs, pieces, runner._graphs, runner._pieces = runner._graphs, runner._pieces, None, None
    try:
        yield
    finally:
        runner._graphs, runner._pieces = graphs, pieces


@contextmanager
def _marked(model: nn.Module) -> Iterator[None]:
    """Calls of the modules just below a decoder layer, and of those outside all layers, are named ranges."""
    parts = {
        id(module): match[1]
        for name, module in model.named_modules()
        if (match := re.fullmatch(r"(?:model\.)?(?:layers\.\d+\.)?([a-z]\w+)", name))
        and match[1] not in ("model", "layers")
    }
    own: list[tuple[type, str, object]] = []
    try:
        for cls in {type(module) for module in model.modules() if id(module) in parts}:
            for method in METHODS:
                if hasattr(cls, method):
                    own.append((cls, method, cls.__dict__.get(method)))
                    setattr(cls, method, _named_call(getattr(cls, method), method, parts))
        yield
    finally:
        for cls, method, was in own:
            if was is None:
                delattr(cls, method)
            else:
                setattr(cls, method, was)


def _named_call(call: Callable[..., Any], method: str, parts: dict[int, str]) -> Callable[..., Any]:
    def named(self: nn.Module, *args: Any, **options: Any) -> Any:
        if id(self) not in parts:
            return call(self, *args, **options)
        part = parts[id(self)] if method == "__call__" else f"{parts[id(self)]}.{method}"
        with torch.profiler.record_function(MARK + part):
            return call(self, *args, **options)

    return named


def summarise(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds by part and by kind of kernel, of a trace's events (Chrome's format, microseconds).

    A kernel belongs to the innermost part during which it was launched.
    """
    parts = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_part: Counter[str] = Counter()
    if not kernels:
        for event in parts:
            by_part[event["name"].removeprefix(MARK)] += event["dur"]
        total = sum(by_part.values()) / 1e3
        return {
            "parts_ms": _in_ms(by_part),
            "kernels_ms": {},
            "total_ms": total,
            "span_ms": total,
            "launches": 0,
        }
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    find = _innermost(parts)
    ours = _our_kernels()
    by_kernel: Counter[str] = Counter()
    for event in kernels:
        by_part[find(launched.get(event["args"].get("correlation")))] += event["dur"]
        by_kernel[_kind(event["name"], ours)] += event["dur"]
    began = min(e["ts"] for e in kernels)
    ended = max(e["ts"] + e["dur"] for e in kernels)
    return {
        "parts_ms": _in_ms(by_part),
        "kernels_ms": _in_ms(by_kernel),
        "total_ms": sum(by_part.values()) / 1e3,
        "span_ms": (ended - began) / 1e3,
        "launches": len(kernels),
    }


def _innermost(parts: list[dict[str, Any]]) -> Callable[[float | None], str]:
    """From a time to the name of the part that began last of those that hold it."""
    ordered = sorted(parts, key=lambda e: e["ts"])
    starts = [e["ts"] for e in ordered]

    def find(at: float | None) -> str:
        if at is None:
            return REST
        index = bisect_right(starts, at) - 1
        # parts nest a few deep at most
        for event in reversed(ordered[max(0, index - 4) : index + 1]):
            if at <= event["ts"] + event["dur"]:
                return event["name"].removeprefix(MARK)
        return REST

    return find


def _our_kernels() -> dict[str, str]:
    """Name of a Triton kernel of this project -> operator and kernel."""
    found = {}
    for root in hybridserve.kernels.__path__:
        for path in Path(root).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            for name in re.findall(r"@triton\.jit(?:\([^@]*?\))?\s*\ndef (\w+)", source):
                found[name] = f"{path.parent.name}: {name}"
    return found


def _kind(name: str, ours: dict[str, str]) -> str:
    if name in ours:
        return ours[name]
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), name[:60])


def _in_ms(microseconds: Counter[str]) -> dict[str, float]:
    return {name: value / 1e3 for name, value in microseconds.most_common()}
