"""Seconds to compile every Triton kernel of a Qwen3.5-9B step from a cold cache, in parallel.

    python tests/benchmarks/kernels_compile.py [--threads 16] [--keep-cache] [--json out.json]

Runs the `warmups()` of every module in tests/benchmarks/kernels from threads of one process; compilation
leaves Python's lock for most of its time. The cache is a temporary folder unless `--keep-cache`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch


def timed(warmup: Callable[[], object]) -> float:
    start = time.perf_counter()
    warmup()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--keep-cache", action="store_true", help="use Triton's own cache folder")
    parser.add_argument("--json", type=Path, help="also write the seconds to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    torch.cuda.init()
    with tempfile.TemporaryDirectory() as folder:
        if not args.keep_cache:
            os.environ["TRITON_CACHE_DIR"] = folder
        from bench_kernels import modules

        start = time.perf_counter()
        named = [
            (f"{module.__name__} {number}", warmup)
            for module in modules()
            if "warmups" in vars(module)
            for number, warmup in enumerate(module.warmups())
        ]
        prepared = time.perf_counter() - start
        start = time.perf_counter()
        with ThreadPoolExecutor(args.threads) as pool:
            seconds = list(pool.map(timed, (warmup for _, warmup in named)))
        torch.cuda.synchronize()
        total = time.perf_counter() - start
    for (name, _), took in sorted(zip(named, seconds, strict=True), key=lambda pair: -pair[1]):
        print(f"{took:7.2f} s  {name}")
    print(f"inputs and imports {prepared:.1f} s")
    print(f"compiled in {total:.1f} s with {args.threads} threads (one after another: {sum(seconds):.1f} s)")
    if args.json:
        each = {name: took for (name, _), took in zip(named, seconds, strict=True)}
        content = {"device": torch.cuda.get_device_name(), "threads": args.threads, "seconds": total}
        args.json.write_text(
            json.dumps(content | {"one after another": sum(seconds), "each": each}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
