"""The expected share of communication of whole models, from a step's cost, a GPU's speeds and latencies."""

from dataclasses import dataclass

from rich.table import Table

from hybridserve.parallel.comm_benchmark.expectation import Latencies, Share, expected_share
from hybridserve.replicas.models.specs import ModelConfig
from hybridserve.replicas.models.step_cost import StepCost, step_cost

CASES = (
    ("decode 1", 1, 1, 2048),
    ("decode 32", 32, 1, 2048),
    ("decode 256", 256, 1, 2048),
    ("prefill", 1, 8192, 0),
)
"""(name, sequences, tokens of each, context before them)."""
RANKS = (2, 4, 8)
STRATEGIES = ("value_heads", "gather_projections", "gather_state")


@dataclass(frozen=True)
class Machine:
    """One GPU's speeds, and how much of them an engine reaches."""

    name: str
    bytes_per_s: float
    flops: float
    efficiency: float

    def __str__(self) -> str:
        speeds = f"{self.bytes_per_s / 1e12:g} TB/s and {self.flops / 1e12:g} TFLOP/s"
        return f"{self.name}, {speeds}, of which {self.efficiency:.0%} is reached"

    def seconds(self, cost: StepCost) -> float:
        """Products, bound by their weights' bytes or by operations, and after them the mixers, likewise."""
        products = max(cost.weight_bytes / self.bytes_per_s, cost.product_flops / self.flops)
        mixers = max((cost.state_bytes + cost.kv_bytes) / self.bytes_per_s, cost.mixer_flops / self.flops)
        return (products + mixers) / self.efficiency


H200 = Machine("H200", 4.3e12, 790e12, 0.85)
"""The speeds are measured (a copy; a large bf16 product). The efficiency is assumed: Qwen3.5-9B has 0.79 to
0.90 on one card, and other shapes and shards are taken to have the same."""


def share_of(
    config: ModelConfig, case: tuple[str, int, int, int], ranks: int, strategy: str, latencies: Latencies
) -> Share:
    """One step of `config` on `ranks` H200."""
    _, sequences, tokens, context = case
    cost = step_cost(
        config, sequences=sequences, tokens=tokens, context=context, tp_size=ranks, strategy=strategy
    )
    messages = [(m.collective, m.count, m.num_bytes) for m in cost.messages]
    return expected_share(H200.seconds(cost), messages, ranks, latencies)


def alone_s(config: ModelConfig, case: tuple[str, int, int, int]) -> float:
    """Seconds of the step on one H200."""
    _, sequences, tokens, context = case
    return H200.seconds(step_cost(config, sequences=sequences, tokens=tokens, context=context, tp_size=1))


def expectation_table(
    name: str, config: ModelConfig, latencies: Latencies, ranks: tuple[int, ...] = RANKS
) -> Table:
    """A row for each case and number of ranks: our cut in full, beside it the others' time and share."""
    table = Table(title=f"{name}, {H200.name}", title_justify="left")
    table.add_column("case")
    columns = (
        "ranks",
        "compute ms",
        "communication ms",
        "step ms",
        "times one GPU",
        "share",
        "overlap saves",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for strategy in STRATEGIES[1:]:
        table.add_column(f"{strategy}: ms, share", justify="right")
    for case in CASES:
        alone = alone_s(config, case)
        for count in ranks:
            ours, *others = (share_of(config, case, count, strategy, latencies) for strategy in STRATEGIES)
            tokens = f" {case[2]:,}" if case[0] == "prefill" else ""
            table.add_row(
                case[0] + tokens,
                str(count),
                f"{ours.compute_s * 1e3:.2f}",
                f"{ours.communication_s * 1e3:.2f}",
                f"{ours.step_s * 1e3:.2f}",
                f"{alone / ours.step_s:.2f} x",
                f"{ours.share:.0%}",
                f"<= {ours.overlap_gain:.0%}",
                *(f"{other.step_s * 1e3:.2f}, {other.share:.0%}" for other in others),
            )
    return table
