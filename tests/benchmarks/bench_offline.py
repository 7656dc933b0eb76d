"""The engine offline, against vLLM's figures and our goals (tests/benchmarks/offline/goals.py).

    python tests/benchmarks/bench_offline.py --shape 9b [--only REGEX] [--cold] [--json out.json]
    python tests/benchmarks/bench_offline.py --shape configs/demo-model --quick
    python tests/benchmarks/bench_offline.py --shape 27b --tensor-parallel-size 2 --against one-gpu.json

`--shape` is a file of configs/models, the end of such a file's name, or a checkpoint's folder. Every row is
printed, and the JSON file written anew, as soon as it is measured. `--cold` starts with empty kernel caches.
Weights of a shape are random: its speed is measured, its words mean nothing; each answer's length is checked.
With several ranks there are no profiles, and memory and starting times are rank 0's; vLLM's figures and the
goals are one device's, so rows have none, but `--against` says how many times better each is than in an
earlier run's JSON file.
"""

import time

BEGAN = time.perf_counter()

import argparse  # noqa: E402  imports are a part of what is measured
import dataclasses  # noqa: E402
import datetime  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from session import Session

    from hybridserve.replicas.llm import LLM

SHAPES = Path(__file__).resolve().parents[2] / "configs" / "models"
sys.path.insert(0, str(Path(__file__).parent / "offline"))
MAX_MODEL_LEN = 135_168


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="9b")
    parser.add_argument("--only", default="", help="regular expression searched in a row's name")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--rounds", type=int, default=5, help="runs of a TPOT row")
    parser.add_argument("--fill", action="store_true", help="capacity with real requests too (a minute)")
    parser.add_argument("--cold", action="store_true", help="empty kernel caches")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks, on GPUs one each")
    parser.add_argument("--against", type=Path, help="JSON of an earlier run, such as one rank's")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--state-dtype", default="float32")
    parser.add_argument("--load-format", default="auto", help="of a checkpoint's folder")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--cache-memory-bytes", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--json", type=Path)
    return parser


def find_model(name: str) -> str:
    """A path as it is, or the one shape whose name is `name` or ends in `-name`.

    Raises:
        ValueError: there is none.
    """
    if Path(name).exists():
        return name
    shapes = sorted(SHAPES.glob("*.yaml"))
    found = [shape for shape in shapes if f"-{shape.stem}".endswith(f"-{name}")]
    if len(found) != 1:
        raise ValueError(f"shape {name!r} is no path and none of {', '.join(s.stem for s in shapes)}")
    return str(found[0])


def main() -> int:
    parser = options()
    args = parser.parse_args()
    try:
        wanted, model = re.compile(args.only), find_model(args.shape)
    except (ValueError, re.error) as error:
        parser.error(str(error))
    if args.cold:
        # read when Triton and the driver are loaded
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-")
        os.environ["CUDA_CACHE_PATH"] = tempfile.mkdtemp(prefix="cuda-")
    import torch
    from baseline import Baseline
    from goals import GOALS, Goal, goals_of, shape_of
    from report import Report
    from rows import QUICK, Sizes, first_lengths, peak_memory, rows, start
    from session import Session, greedy
    from step_profile import profile_decode, profile_mixed, profile_prefill

    from hybridserve.replicas.models.config import load_model_config

    imports = time.perf_counter() - BEGAN
    config = load_model_config(model)
    ranks = args.tensor_parallel_size
    goals, sizes = goals_of(config), QUICK if args.quick else Sizes()
    if goals is GOALS["27b"] and not args.quick:
        sizes = dataclasses.replace(sizes, contexts=((1, 2048), (32, 2048), (256, 2048)))
    if ranks > 1:
        # they are for one device
        goals = {}
    table = list(rows(sizes, 2 if args.quick else args.rounds, args.fill))
    profiles = {
        f"profile of a decode step of {batch}": lambda s, n=batch: profile_decode(s, n, sizes.tpot_prompt)
        for batch in sizes.profile_batches
    }
    profiles["profile of a prefill"] = lambda s: profile_prefill(s, sizes.profile_prompt)
    profiles[f"profile of {sizes.profile_steps} mixed steps"] = lambda s: profile_mixed(s, sizes)
    names = ["start", *(row.name for row in table), "peak memory", *profiles]
    if not any(map(wanted.search, names)):
        parser.error(f"--only {args.only!r} matches no row")
    if args.list:
        print("\n".join(filter(wanted.search, names)))
        return 0
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    about = describe(args, model, on_gpu)
    baseline = None
    if args.against is not None:
        try:
            baseline = Baseline(args.against, about, shape_of(config), ranks)
        except ValueError as error:
            parser.error(str(error))
    report = Report(about, args.json, baseline)
    llm = make_llm(args, model, config.max_position_embeddings)
    ready = time.perf_counter() - BEGAN
    session = Session(llm, torch.device("cuda" if on_gpu else "cpu"), random.Random(0))
    if wanted.search("start"):
        report.add("start to ready", start(session, imports, ready), goals.get("start to ready", Goal()))
        name = f"start and first lengths, {'cold' if args.cold else 'warm'}"
        report.add(name, first_lengths(session, sizes, ready), goals.get(name, Goal()))
    session.generate([session.prompt(sizes.warm_up)], greedy(8))
    measures = {
        row.name: lambda row=row: report.add(row.name, row.measure(session), goals.get(row.name, Goal()))
        for row in table
    }
    if on_gpu:
        measures["peak memory"] = lambda: report.add("peak memory", peak_memory(session), Goal())
    for name, profile in profiles.items():
        measures[name] = lambda name=name, profile=profile: report.add_profile(name, profile(session))
        if ranks > 1:
            # without graphs on one rank alone, the ranks' sums would not be the same ones
            reason = "a profile sees this process alone, and takes its graphs away"
            measures[name] = lambda name=name, reason=reason: report.skip(name, reason)
    failed = 0
    for name in filter(wanted.search, measures):
        session.rng = random.Random(0)
        try:
            measures[name]()
        except (ValueError, RuntimeError) as error:
            # the rows after it are worth having
            report.add_failure(name, error)
            failed += 1
            if not recovered(session):
                break
    llm.shutdown()
    return int(failed > 0)


def describe(args: argparse.Namespace, model: str, on_gpu: bool) -> dict[str, object]:
    """What is measured on what."""
    import torch

    ranks = args.tensor_parallel_size
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    return {
        "model": model,
        "tensor_parallel_size": ranks,
        "state_dtype": args.state_dtype,
        "device": device if ranks == 1 or not on_gpu else f"{ranks} x {device}",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "sizes": "quick" if args.quick else "full",
    }


def make_llm(args: argparse.Namespace, model: str, max_position_embeddings: int) -> "LLM":
    """The engine that the options ask for."""
    from hybridserve.replicas.llm import LLM
    from hybridserve.replicas.models.config import is_shape_file

    say_how_ranks_meet()
    return LLM(
        model,
        load_format="dummy" if is_shape_file(model) else args.load_format,
        device=args.device,
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        state_dtype=args.state_dtype,
        max_model_len=min(max_position_embeddings, MAX_MODEL_LEN),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        cache_memory_bytes=args.cache_memory_bytes,
        num_threads=args.num_threads,
        gpu_memory_utilization=args.gpu_memory_utilization,
        skip_tokenizer_init=True,
        show_progress=False,
        seed=0,
    )


def say_how_ranks_meet() -> None:
    """Have it told how small messages are summed, which decides what several GPUs give."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("hybridserve.parallel.group").setLevel(logging.INFO)


def recovered(session: "Session") -> bool:
    """Whether the engine can go on after a row has failed: what it left is aborted."""
    try:
        session.clear()
    except RuntimeError as error:
        print(f"the engine cannot go on: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
