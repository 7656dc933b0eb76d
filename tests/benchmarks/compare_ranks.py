"""Whether a model on several ranks gives the tokens that it gives on one, greedily; exit status 1 if not.

    python tests/benchmarks/compare_ranks.py --shape 9b --tensor-parallel-size 2 4 [--json out.json]
    python tests/benchmarks/compare_ranks.py --shape configs/demo-model --device cpu --tensor-parallel-size 2

`--shape` is as for bench_offline.py; a shape's random weights are the same on any number of ranks. Tokens may
differ where the two likeliest are as near as rounding: see tests/benchmarks/offline/agreement.py.
"""

import argparse
import dataclasses
import gc
import json
import random
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "offline")]

from agreement import Agreement, compare, reference_answers  # noqa: E402
from bench_offline import find_model, say_how_ranks_meet  # noqa: E402

from hybridserve.replicas.llm import LLM  # noqa: E402
from hybridserve.replicas.models.config import is_shape_file, load_model_config  # noqa: E402
from hybridserve.replicas.models.sharding import check_tp_size  # noqa: E402

LENGTHS = (1, 5, 33, 64, 65, 130, 300, 700)
BATCHED_TOKENS = 8192
LONG = 3000
"""A prompt of each four with `--long`: steps are then so long that ranks run them in two parts."""


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="9b")
    parser.add_argument("--tensor-parallel-size", type=int, nargs="+", default=[2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--enforce-eager", action="store_true", help="no graphs, which start faster")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--long", action="store_true", help=f"every fourth prompt has {LONG:,} tokens")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--cache-memory-bytes", type=int, help="by default 8 GiB, 128 MiB on a CPU")
    parser.add_argument("--json", type=Path)
    return parser


def make_llm(args: argparse.Namespace, model: str, ranks: int) -> LLM:
    on_cpu = args.device == "cpu" or not torch.cuda.is_available()
    return LLM(
        model,
        load_format="dummy" if is_shape_file(model) else "auto",
        device=args.device,
        dtype=args.dtype,
        state_dtype=args.state_dtype,
        tensor_parallel_size=ranks,
        enforce_eager=args.enforce_eager,
        max_model_len=4096,
        max_num_seqs=args.prompts,
        max_num_batched_tokens=BATCHED_TOKENS,
        cache_memory_bytes=args.cache_memory_bytes or (2**27 if on_cpu else 2**33),
        num_threads=1 if on_cpu else None,
        skip_tokenizer_init=True,
        show_progress=False,
        seed=0,
    )


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def report(ranks: int, found: Agreement, seconds: float) -> dict[str, object]:
    for line in found.lines():
        say(f"TP {ranks} against 1: {line}")
    verdict = {"bound": found.bound, "is_rounding": found.is_rounding, "seconds": seconds}
    return {"tensor_parallel_size": ranks, **dataclasses.asdict(found), **verdict}


def main() -> int:
    parser = options()
    args = parser.parse_args()
    try:
        model = find_model(args.shape)
        config = load_model_config(model)
        for name in ("prompts", "tokens"):
            if getattr(args, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}")
        for ranks in args.tensor_parallel_size:
            if ranks < 1:
                raise ValueError(f"tensor_parallel_size must be at least 1, got {ranks}")
            check_tp_size(config, ranks)
        if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
            raise ValueError(f"json {str(args.json)!r} is no file in a folder that is there")
    except ValueError as error:
        parser.error(str(error))
    say_how_ranks_meet()
    vocab_size, rng = config.vocab_size, random.Random(0)
    lengths = [LENGTHS[at % len(LENGTHS)] for at in range(args.prompts)]
    if args.long:
        lengths[::4] = [LONG] * len(lengths[::4])
    prompts = [[rng.randrange(10, vocab_size) for _ in range(length)] for length in lengths]
    began = time.perf_counter()
    llm = make_llm(args, model, 1)
    started = time.perf_counter()
    answers, noise = reference_answers(llm, prompts, args.tokens)
    say(f"TP 1: start {started - began:.1f} s, answers {time.perf_counter() - started:.1f} s")
    del llm
    found = []
    for ranks in args.tensor_parallel_size:
        gc.collect()
        torch.cuda.empty_cache()
        began = time.perf_counter()
        llm = make_llm(args, model, ranks)
        started = time.perf_counter()
        found.append(report(ranks, compare(llm, answers, noise), time.perf_counter() - started))
        llm.shutdown()
        say(f"TP {ranks}: start {started - began:.1f} s, answers {time.perf_counter() - started:.1f} s")
        del llm
        if args.json:
            args.json.write_text(json.dumps({"model": model, "dtype": args.dtype, "runs": found}, indent=1))
    return int(not all(one["is_rounding"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
