"""What one ingress knows of one replica: its last report, its pace, and what was sent to it.

Plain sums; whether the replica is there, and who may use this when, is `PoolLoads`' affair.
"""

from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_sums import ReplicaShare
from hybridserve.cluster.routing.rates import TokenRate


class ReplicaAccount:
    """One replica's, or that of requests which were given to none yet."""

    # a pool's ingress hears of each replica ten times a second at least
    __slots__ = ("_rate", "_starts", "own", "report", "unseen", "unseen_prompts")

    def __init__(self) -> None:
        self.report: ReplicaLoad | None = None
        self.own = 0
        """Remaining tokens of this ingress' requests."""
        self.unseen = 0
        """The part of `own` that no report counts yet."""
        self.unseen_prompts = 0
        """And of that, the prompts."""
        self._rate = TokenRate()
        self._starts = TokenRate(forgets=True)
        """Prompts' tokens while there is a queue. What limits them, room in the batch or computing, may be
        another thing in the next queue."""

    @property
    def outstanding(self) -> int:
        report = self.report
        # without reports an ingress knows at least what it has sent itself
        return self.own if report is None else report.outstanding_tokens + self.unseen

    @property
    def empty(self) -> bool:
        return self.report is None and not (self.own or self.unseen or self.unseen_prompts)

    def send(self, tokens: int, prompt_tokens: int) -> None:
        """So many tokens, their prompt's among them, that no report counts; negative: they are not here."""
        self.own += tokens
        self.unseen += tokens
        self.unseen_prompts += prompt_tokens

    def observe(self, now: float, load: ReplicaLoad) -> None:
        """A report has come."""
        self.report = load
        self._rate.observe(now, load.progressed_tokens, load.outstanding_tokens > 0)
        self._starts.observe(now, load.started_tokens, load.queued_tokens > 0)

    def forget(self) -> None:
        """No more reports will come."""
        self.report = None
        self._rate, self._starts = TokenRate(), TokenRate(forgets=True)

    def share(self) -> ReplicaShare:
        """What the replica adds to its pool's sums."""
        report = self.report
        if report is None:
            return ReplicaShare(self.own, self.unseen_prompts, None, None)
        return ReplicaShare(
            report.outstanding_tokens + self.unseen,
            report.queued_tokens + self.unseen_prompts,
            self._rate.tokens_per_s,
            # prompts get their first token in turn, at the pace at which they just did
            self._starts.tokens_per_s,
        )
