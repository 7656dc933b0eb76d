"""hybridserve against transformers' own generate on a CPU, as ratios within one run.

    python tests/benchmarks/bench_cpu.py [--model configs/demo-model] [--rounds 5] [--json out.json]

Both sides run fp32 with the same number of threads and alternate round by round, so that a drift of the
machine hits both; medians over rounds are compared. Run it on an otherwise idle machine: a second busy
process slows either side many times over. Absolute times hold only for the machine they were taken on.
"""

import argparse
import datetime
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from hybridserve.replicas.llm import LLM, SamplingParams

PROMPT_TOKENS = 64
NEW_TOKENS = 64
BATCH = 16
PREFILL_TOKENS = 2048
MARGIN = 1e-3
"""Greedy tokens must agree up to the first position where transformers' two best logits are this close."""


class Ours:
    def __init__(self, model: str) -> None:
        self.llm = LLM(model, device="cpu", dtype="float32")

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs]


class Theirs:
    def __init__(self, model: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """One batch of equally long prompts."""
        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
        )
        return out[:, ids.shape[1] :].tolist()

    @torch.inference_mode()
    def margins(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Distance between the two best logits at each generated position."""
        logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        return (best[:, 0] - best[:, 1]).tolist()


def check_same_tokens(ours: Ours, theirs: Theirs, prompt: list[int]) -> int:
    """Exit unless both give the same greedy tokens up to the first near tie; return how many that is."""
    # transformers bans end tokens while min_new_tokens lasts, so compare on a plain run
    want = theirs.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
    want = want[0, len(prompt) :].tolist()
    got = ours.run([prompt], len(want))[0]
    for at, margin in enumerate(theirs.margins(prompt, want)):
        if margin < MARGIN:
            return at
        if got[at] != want[at]:
            raise SystemExit(f"token {at} is {got[at]}, transformers says {want[at]} (margin {margin:.4f})")
    return len(want)


def alternate(rounds: int, sides: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each side in each round, after one warm-up of each."""
    for run in sides.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return times


def measure(ours: Ours, theirs: Theirs, rounds: int, vocab_size: int) -> dict[str, dict[str, float]]:
    """All rows of the table: medians of both sides and their ratio (above 1: ours is faster)."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, vocab_size) for _ in range(length)]

    one, equal = prompt(PROMPT_TOKENS), [prompt(PROMPT_TOKENS) for _ in range(BATCH)]
    # the same number of prompt tokens in all, from 4 to 124 a prompt
    ragged = [prompt(4 + 8 * i) for i in range(BATCH)]
    long = prompt(PREFILL_TOKENS)
    single = alternate(
        rounds, {"ours": lambda: ours.run([one], NEW_TOKENS), "theirs": lambda: theirs.run([one], NEW_TOKENS)}
    )
    batch = alternate(
        rounds,
        {
            "ours": lambda: ours.run(equal, NEW_TOKENS),
            "ragged": lambda: ours.run(ragged, NEW_TOKENS),
            "theirs": lambda: theirs.run(equal, NEW_TOKENS),
        },
    )
    prefill = alternate(
        rounds, {"ours": lambda: ours.run([long], 1), "theirs": lambda: theirs.run([long], 1)}
    )
    median = {
        name: {side: statistics.median(times) for side, times in group.items()}
        for name, group in (("single", single), ("batch", batch), ("prefill", prefill))
    }
    tokens = BATCH * NEW_TOKENS
    one_after_another = median["single"]["theirs"] * BATCH
    return {
        "1 sequence, tokens/s": row(
            NEW_TOKENS / median["single"]["ours"], NEW_TOKENS / median["single"]["theirs"], 1.5
        ),
        "16 at once, tokens/s": row(
            tokens / median["batch"]["ours"], tokens / median["batch"]["theirs"], 1.5
        ),
        "16 at once against one after another, tokens/s": row(
            tokens / median["batch"]["ours"], tokens / one_after_another, 12
        ),
        "16 ragged against 16 equal (both ours), tokens/s": row(
            tokens / median["batch"]["ragged"], tokens / median["batch"]["ours"], 0.97
        ),
        f"prefill of {PREFILL_TOKENS}, tokens/s": row(
            PREFILL_TOKENS / median["prefill"]["ours"], PREFILL_TOKENS / median["prefill"]["theirs"], 1.1
        ),
    }


def row(ours: float, other: float, goal: float) -> dict[str, float]:
    return {"ours": ours, "other": other, "ratio": ours / other, "goal": goal}


def show(rows: dict[str, dict[str, float]], heading: str) -> None:
    table = Table(title=heading)
    for column in ("work", "hybridserve", "against", "ratio", "goal"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for name, r in rows.items():
        verdict = f"[{'green' if r['ratio'] >= r['goal'] else 'red'}]{r['ratio']:.2f}"
        table.add_row(name, f"{r['ours']:.1f}", f"{r['other']:.1f}", verdict, f"{r['goal']:g}")
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="configs/demo-model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    ours, theirs = Ours(args.model), Theirs(args.model)
    prompt = ours.llm.get_tokenizer().encode("def fibonacci(n):\n    ")
    compared = check_same_tokens(ours, theirs, prompt)
    rows = measure(ours, theirs, args.rounds, theirs.model.config.vocab_size)
    heading = (
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, fp32, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, {compared} greedy tokens equal"
    )
    show(rows, heading)
    if args.json:
        args.json.write_text(json.dumps({"heading": heading, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
