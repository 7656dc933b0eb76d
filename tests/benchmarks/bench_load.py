"""Time how a checkpoint's weights are read, cold and warm, on a checkpoint of random values of any shape.

    python tests/benchmarks/bench_load.py --folder /tmp/9b --make --shape configs/models/qwen3.5-9b.yaml
    python tests/benchmarks/bench_load.py --folder /tmp/9b [--device cuda] [--dtype bfloat16] [--json PATH]

`--make` writes the checkpoint first (files of 4 GB, `config.json` from the shape); nobody removes it. "Cold"
gives the files' pages back to the kernel before the read, so it measures the disk; "warm" reads them from the
page cache; both build the model anew and include that. The plain row is safetensors' own `load_file` to the
same device, one file after the other, without a model to fill.
"""

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hybridserve.parallel.group import SINGLE
from hybridserve.parallel.weights.dummy import DummyTensor
from hybridserve.parallel.weights.loader import checkpoint_targets
from hybridserve.replicas.models.config import load_model_config, override, read_mapping
from hybridserve.replicas.models.registry import DTYPES, build_model, load_model

FILE_BYTES = 4 * 10**9


def make_checkpoint(shape: Path, folder: Path, overrides: dict[str, object], file_bytes: int) -> int:
    """Write random weights of `shape` in its own dtype; returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    values = override(read_mapping(shape), overrides)
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    config = load_model_config(shape, overrides)
    model = build_model(config, SINGLE, DTYPES[config.dtype], torch.device("meta"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weight_map: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    total = held = 0

    def write() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        tensors.clear()

    for name, target in checkpoint_targets(model, model.checkpoint_name).items():
        source = DummyTensor(
            name, target.parameter.checkpoint_shape(target.section), target.parameter.init, 0
        )
        values = torch.empty(source.shape, dtype=DTYPES[config.dtype], device=device)
        source.copy_to(values, 0, 0, source.shape[0])
        if tensors and held + values.nbytes > file_bytes:
            write()
            held = 0
        tensors[name] = values.cpu()
        held += values.nbytes
        total += values.nbytes
    write()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def forget_pages(folder: Path) -> None:
    """Drop the files from the page cache, as far as the kernel follows the advice."""
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        try:
            # dirty pages stay whatever is advised
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_pages(folder: Path) -> None:
    """Bring the files into the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(2**24):
                pass


def timed_load(folder: Path, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of one `load_model`, the model built and dropped."""
    config = load_model_config(folder)
    began = time.perf_counter()
    model = load_model(folder, config, SINGLE, dtype, device)
    _wait(device)
    seconds = time.perf_counter() - began
    del model
    _free(device)
    return seconds


def timed_plain(folder: Path, device: torch.device) -> float:
    """Seconds of safetensors' own reading."""
    began = time.perf_counter()
    held = [load_file(path, device=str(device)) for path in sorted(folder.glob("*.safetensors"))]
    if device.type == "cpu":
        # it maps the files: touch what a copy would have read
        for tensors in held:
            for tensor in tensors.values():
                tensor.clone()
    _wait(device)
    seconds = time.perf_counter() - began
    del held
    _free(device)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--make", action="store_true", help="write the checkpoint; needs --shape")
    parser.add_argument("--shape", type=Path, help="a file of configs/models")
    parser.add_argument("--hf-overrides", type=json.loads, default={}, help="JSON, with --make")
    parser.add_argument("--file-bytes", type=int, default=FILE_BYTES, help="of one file, with --make")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.make:
        if args.shape is None:
            parser.error("--make needs --shape")
        began = time.perf_counter()
        total = make_checkpoint(args.shape, args.folder, args.hf_overrides, args.file_bytes)
        print(f"wrote {total / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s", flush=True)
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    total = sum(path.stat().st_size for path in args.folder.glob("*.safetensors"))
    if not total:
        parser.error(f"no safetensors in {args.folder}")
    if device.type == "cuda":
        # a context is not a part of reading weights
        torch.zeros(1, device=device)
    results: dict[str, object] = {"bytes": total, "device": str(device), "dtype": args.dtype}

    def show(name: str, seconds: list[float]) -> None:
        median = statistics.median(seconds)
        results[name] = {"seconds": seconds, "bytes_per_s": total / median}
        print(
            f"{name:6s} {median:7.2f} s  {total / median / 1e6:8.0f} MB/s  "
            f"({min(seconds):.2f} to {max(seconds):.2f} s, {len(seconds)} runs)",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))

    forget_pages(args.folder)
    show("cold", [timed_load(args.folder, device, dtype)])
    read_pages(args.folder)
    show("warm", [timed_load(args.folder, device, dtype) for _ in range(args.rounds)])
    show("plain", [timed_plain(args.folder, device) for _ in range(args.rounds)])


if __name__ == "__main__":
    main()
