"""What a request asks of the sampler, and what values it may ask.

Owns the fields, their defaults and their bounds. Knows nothing of tensors or of the vocabulary's size (the
engine checks token ids against the model). Field names are vLLM's.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 64
MAX_LOGIT_BIAS = 1024
_PLAIN = frozenset((int, float, bool, type(None)))


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Order of operations on a row of logits (fp32): repetition, frequency and presence penalty; `logit_bias`;
    end tokens masked until `min_tokens`; division by `temperature`; `top_k`; `top_p`; `min_p`; draw. Reported
    logprobs are those of the raw logits, before any of these.

    Raises:
        ValueError: a field is out of its bounds; the message names the field and the value.
    """

    n: int = 1
    temperature: float = 1.0
    """0 is greedy; the draw and the three filters below are then unused."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: the whole vocabulary."""
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    """None: as many as fit in the context."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the chosen one; None reports nothing."""
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._normalise()
        _whole("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_stops()
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are taken"
            )
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias key", token_id, 0, None)
            _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    def _normalise(self) -> None:
        """Accept one stop string, and lists where tuples are kept."""
        stop = self.stop
        if stop is None:
            stop = ()
        elif isinstance(stop, str):
            stop = (stop,)
        elif not isinstance(stop, list | tuple):
            raise ValueError(f"stop must be a string or a list of strings, got {stop!r}")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, Collection) or isinstance(ids, str | bytes | Mapping):
            raise ValueError(f"stop_token_ids must be a list of token ids, got {ids!r}")
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias must be a mapping of token ids to numbers, got {bias!r}")
        for name, value in vars(self).copy().items():
            if type(value) in _PLAIN:
                # nearly all; to ask abstract classes costs more than all checks
                continue
            # numbers of other libraries, such as numpy's, become Python's own
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, name, int(value))
            elif isinstance(value, Real) and not isinstance(value, bool | float):
                object.__setattr__(self, name, float(value))
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "logit_bias", dict(bias))

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(self.stop)} entries, at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
            if len(text) > MAX_STOP_STRING_LENGTH:
                raise ValueError(
                    f"stop has a string of {len(text)} characters, at most {MAX_STOP_STRING_LENGTH}"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries, at most {MAX_STOP_TOKEN_IDS}"
            )
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids entry", token_id, 0, None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> bool:
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    """Raise unless `value` is an int (a bool is not) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bounds}, got {value}")


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise unless `value` is a finite real number in [low, high], or (low, high] with `open_low`."""
    # math.isfinite overflows on an integer beyond all floats
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value
        or abs(value) == math.inf
    ):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value > high or value < low or (open_low and value == low):
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        raise ValueError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {shown}")
