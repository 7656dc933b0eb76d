"""How long a step takes, from measured points; a step is decode rows, chunks of prompts, or both.

A mixed step takes what its prompt tokens take alone, and for its rows what rows add to a step of their own:
the weights are read once for both.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hybridserve.cluster.settings import describe_error

Points = tuple[tuple[float, float], ...]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_MAX_ROWS = 4096


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DecodePoints(_Section):
    """Steps of decode rows alone."""

    context: _Positive
    """Tokens of each row's context, on average, in `step_ms`."""
    step_ms: Annotated[Mapping[Annotated[int, Field(gt=0)], _Positive], Field(min_length=1)]
    """By number of rows."""
    long_context: Annotated[Mapping[Annotated[int, Field(gt=0)], _Positive], Field(max_length=1)] = {}
    """A step of one row at another context: {tokens: ms}."""


class CurveFile(_Section):
    """What was measured on one engine."""

    name: str
    source: str
    """The command, the machine and the date."""
    max_num_batched_tokens: Annotated[int, Field(gt=0)]
    """Of the engine that was measured: longer prompts took several steps."""
    decode: DecodePoints
    first_token_ms: Annotated[Mapping[Annotated[int, Field(gt=0)], _Positive], Field(min_length=1)]
    """Of one prompt alone, by its tokens."""

    @model_validator(mode="after")
    def _check_prompts(self) -> "CurveFile":
        if min(self.first_token_ms) > self.max_num_batched_tokens:
            raise ValueError(
                f"first_token_ms needs a prompt of at most max_num_batched_tokens "
                f"{self.max_num_batched_tokens}, got {min(self.first_token_ms)}"
            )
        return self


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a step. All points ascend."""

    name: str
    decode_points: Points
    """(rows, seconds), at `decode_context` tokens of context each."""
    prefill_points: Points
    """(tokens, seconds) of a step of one prompt from its beginning."""
    decode_context: float = 0.0
    decode_context_s: float = 0.0
    """For each token of context that a row reads."""
    prefill_context_s: float = 0.0
    """For each token of a chunk and each token of context before the chunk."""

    @cached_property
    def _decode_s(self) -> list[float]:
        """By rows; the entry of none is what a mixed step's rows are reckoned from."""
        return [max(0.0, interpolate(self.decode_points, rows)) for rows in range(_MAX_ROWS + 1)]

    def decode_s(self, rows: int, context_tokens: float) -> float:
        """A step of `rows` decode rows that read `context_tokens` in sum."""
        extra = self.decode_context_s * (context_tokens - rows * self.decode_context)
        return max(0.0, self._decode_s[rows] + extra)

    def step_s(
        self, rows: int, context_tokens: float, prompt_tokens: int, chunk_context: float = 0.0
    ) -> float:
        """Any step.

        chunk_context: the sum over chunks of tokens times context tokens before the chunk.
        """
        if prompt_tokens == 0:
            return self.decode_s(rows, context_tokens)
        prompts = interpolate(self.prefill_points, prompt_tokens) + self.prefill_context_s * chunk_context
        if rows == 0:
            return prompts
        return prompts + max(0.0, self.decode_s(rows, context_tokens) - self._decode_s[0])

    def first_token_s(self, prompt_tokens: int, max_num_batched_tokens: int) -> float:
        """Of a prompt alone on an engine of such steps."""
        total = 0.0
        for start in range(0, prompt_tokens, max_num_batched_tokens):
            count = min(max_num_batched_tokens, prompt_tokens - start)
            total += self.step_s(0, 0, count, count * start)
        return total


def interpolate(points: Points, x: float) -> float:
    """Straight lines between the points; the first's value below it, the last line goes on above the last."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def fit_curve(file: CurveFile) -> StepCurve:
    """The curve through the points of one step; what context costs is fitted to the longer prompts."""
    decode = _points(file.decode.step_ms)
    longest = file.max_num_batched_tokens
    prefill = _points({n: ms for n, ms in file.first_token_ms.items() if n <= longest})
    context_s = 0.0
    for context, ms in file.decode.long_context.items():
        context_s = (ms / 1e3 - interpolate(decode, 1)) / (context - file.decode.context)
    curve = StepCurve(file.name, decode, prefill, file.decode.context, max(0.0, context_s))
    return replace(curve, prefill_context_s=_fit_context(curve, file.first_token_ms, longest))


def _fit_context(curve: StepCurve, first_token_ms: Mapping[int, float], longest: int) -> float:
    """The least sum of squared relative errors, over prompts of several chunks."""
    over = under = 0.0
    for tokens, ms in first_token_ms.items():
        if tokens > longest:
            seconds = ms / 1e3
            x = sum(min(longest, tokens - start) * start for start in range(0, tokens, longest)) / seconds
            over += x * (seconds - curve.first_token_s(tokens, longest)) / seconds
            under += x * x
    return max(0.0, over / under) if under else 0.0


def _points(by_size: Mapping[int, float]) -> Points:
    return tuple((size, ms / 1e3) for size, ms in sorted(by_size.items()))


def curve_errors(file: CurveFile, curve: StepCurve) -> list[tuple[str, float, float]]:
    """(what, measured ms, by the curve ms) of every measured point."""
    rows = [
        (f"step of {n} rows", ms, 1e3 * curve.decode_s(n, n * file.decode.context))
        for n, ms in sorted(file.decode.step_ms.items())
    ]
    rows += [
        (f"step of 1 row at {n:,}", ms, 1e3 * curve.decode_s(1, n))
        for n, ms in file.decode.long_context.items()
    ]
    return rows + [
        (f"prompt of {n:,}", ms, 1e3 * curve.first_token_s(n, file.max_num_batched_tokens))
        for n, ms in sorted(file.first_token_ms.items())
    ]


def read_curve(path: Path) -> CurveFile:
    """Measured points from a YAML file, like those of configs/step-curves.

    Raises:
        ValueError: it is no such file; the message names the key.
        OSError: it cannot be read.
    """
    try:
        return CurveFile.model_validate(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(map(describe_error, error.errors()))}") from None
