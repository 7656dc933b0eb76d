"""Whether a run measured the server, or its own client."""

from dataclasses import asdict, dataclass

from serve.client import Measured

from hybridserve.cluster.simulation.outcomes import Figures, Quantiles, quantiles

# above these the client's own delay shows in what it reports of the server
_MAX_CPU_SHARE = 0.8
_MAX_DELAY_SHARE = 0.1
_LEAST_DELAY_S = 0.005


@dataclass(frozen=True)
class ClientReport:
    """The client's own delays, in seconds."""

    late: Quantiles
    loop_delay: Quantiles
    cpu_share: float
    bottleneck: str | None
    """Why the client, not the server, set the figures; None when it did not."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def line(self) -> str:
        late, loop = ((0.0 if each is None else each * 1e3) for each in (self.late.p99, self.loop_delay.p99))
        told = f"client: p99 sent {late:.1f} ms late, p99 event-loop delay {loop:.1f} ms, "
        told += f"{self.cpu_share:.0%} of a core"
        return (
            told if self.bottleneck is None else f"{told}\nTHE CLIENT WAS THE BOTTLENECK: {self.bottleneck}"
        )


def client_report(measured: Measured, found: Figures) -> ClientReport:
    """Judge the client beside the median time to the first token that it measured."""
    late, loop = quantiles(measured.late_s), quantiles(measured.loop_delay_s)
    ttft = found.buckets[-1].ttft.p50
    allowed = max(_LEAST_DELAY_S, _MAX_DELAY_SHARE * (ttft or 0.0))
    reasons = [
        f"{name} {delay.p90 * 1e3:.1f} ms in one case of ten, and the median time to the first token allows "
        f"{allowed * 1e3:.1f} ms"
        for name, delay in (("requests left late by", late), ("its event loop was late by", loop))
        if delay.p90 is not None and delay.p90 > allowed
    ]
    if measured.cpu_share > _MAX_CPU_SHARE:
        reasons.append(f"it used {measured.cpu_share:.0%} of one core")
    return ClientReport(late, loop, measured.cpu_share, "; ".join(reasons) or None)
