"""The ingress' options, resolved and checked once. Knows nothing of Serve's own options."""

import math
from dataclasses import dataclass

from hybridserve.replicas.sampling_params import MAX_N


@dataclass(frozen=True)
class IngressOptions:
    """What one ingress replica allows.

    Raises:
        ValueError: an option is out of its bounds; the message names it and its value.
    """

    model_name: str
    """The id that clients send as `model`."""
    max_body_bytes: int = 8 * 1024 * 1024
    max_concurrent_requests: int = 1024
    """Generation requests in flight in this replica; one more is answered with 429."""
    max_choices: int = MAX_N
    """Answers of one request: its prompts times `n`."""
    retry_after_seconds: float = 1.0
    """What a refused client is told to wait (rounded up to whole seconds)."""
    inline_encode_characters: int = 4096
    """Longer prompts are tokenised in a thread, so that they do not hold up other requests' tokens."""
    name_requests: bool = True
    """Answer with an `x-request-id`; False behind a server that adds one itself, as Serve does."""

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str) or not self.model_name:
            raise ValueError(f"model_name must be a non-empty string, got {self.model_name!r}")
        for name in ("max_body_bytes", "max_concurrent_requests", "max_choices", "inline_encode_characters"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not math.isfinite(self.retry_after_seconds) or self.retry_after_seconds <= 0:
            raise ValueError(
                f"retry_after_seconds must be a positive number, got {self.retry_after_seconds!r}"
            )

    @property
    def retry_after(self) -> str:
        """The `Retry-After` header."""
        return str(math.ceil(self.retry_after_seconds))
