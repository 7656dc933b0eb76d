"""The report's JSON, as a JSON Schema whose descriptions say what each field is. Torch-free."""

from typing import Any

_TEXT = {"type": "string"}


def _number(description: str) -> dict[str, Any]:
    return {"type": "number", "description": description}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


_TIMES = _object(
    {
        "replays": {
            "type": "integer",
            "minimum": 1,
            "description": "how many replays the percentiles are of",
        },
        "p50_us": _number("microseconds of the slowest rank of each replay"),
        "p90_us": _number("likewise"),
        "p99_us": _number("likewise; with fewer than 100 replays the slowest of all"),
    }
)

_COLLECTIVE = _object(
    {
        "collective": {"enum": ["all_reduce", "all_gather", "reduce_scatter"]},
        "implementation": _TEXT,
        "mode": {
            "enum": ["eager", "graph"],
            "description": "launched from the host, or a CUDA graph's replay",
        },
        "ranks": {"type": "integer", "minimum": 2},
        "label": {"type": "string", "description": "which message of the model this is; empty in the sweep"},
        "bytes": {"type": "integer", "description": "the message's size by nccl-tests' definition"},
        "times": _TIMES,
        "algbw_gbps": _number("bytes / p50, in 1e9 bytes a second"),
        "busbw_gbps": _number("algbw * 2(n-1)/n for all_reduce, * (n-1)/n for the others"),
        "max_error": _number("largest absolute error against the fp32 sum, checked before timing"),
    }
)

_MESSAGE = _object(
    {
        "label": {"enum": ["hidden", "norm", "projections", "state"]},
        "collective": {"enum": ["all_reduce", "all_gather", "reduce_scatter"]},
        "bytes": {
            "type": "integer",
            "description": "by nccl-tests' definition, counted at the process group",
        },
        "wire_bytes": _number("what each rank must send for it at least: bytes * 2(n-1)/n or * (n-1)/n"),
    }
)

_WHICH = {
    "strategy": {
        "enum": [
            "value_heads",
            "value_heads_in_parts",
            "head_v_dim",
            "gather_projections",
            "gather_state",
        ]
    },
    "case": _TEXT,
    "phase": {"enum": ["decode", "prefill"]},
    "tokens": {"type": "integer", "minimum": 1},
    "sequences": {"type": "integer", "minimum": 1},
    "ranks": {"type": "integer", "minimum": 1},
}

_STRATEGY = _object(
    {
        **_WHICH,
        "mode": {"enum": ["eager", "graph"]},
        "with_communication": {
            **_TIMES,
            "description": "one layer with the residual and norm behind it, one step",
        },
        "compute_only": {**_TIMES, "description": "the same code, its collectives left out"},
        "communication_us": _number("difference of the medians; at one rank the noise of the machine"),
        "share": _number("communication_us / with_communication.p50_us"),
        "overlap_bound_us": _number(
            "the larger of computing and communicating: what perfect overlap would take"
        ),
        "layer_copies": {"type": "integer", "description": "layers timed in turn; times are divided by it"},
        "messages": {"type": "array", "items": _MESSAGE, "description": "of one step of one layer"},
        "message_bytes_per_token": _number("sum of the messages' bytes / tokens"),
        "wire_bytes_per_token": _number("sum of what each rank must send / tokens"),
        "state_wire_bytes": _number("of these, bytes of recurrent state in the step, sent by each rank"),
        "state_bytes_per_rank": {"type": "integer", "description": "recurrent state this rank keeps"},
        "max_relative_error": _number("of output and states against the layer on one rank, Euclidean norms"),
    }
)

_UNAVAILABLE = _object({**_WHICH, "unavailable": {"type": "string", "description": "why it cannot run"}})

REPORT_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "hybridserve bench comm",
    **_object(
        {
            "schema_version": {"const": 1},
            "settings": {
                "type": "object",
                "description": "what was asked for: see BenchmarkSettings",
                "required": ["layer", "dtype", "backend", "tp_size", "sizes", "cases", "quick", "seed"],
            },
            "environment": {
                "type": "object",
                "description": "rank 0's machine; gpu only with nccl, nodes (of the ranks) only on Ray",
                "required": ["cpu", "cores", "load_average", "versions", "switches"],
            },
            "not_measured": {
                "type": "object",
                "description": "implementations that cannot run between these ranks, and why",
                "additionalProperties": _TEXT,
            },
            "collectives": {"type": "array", "items": _COLLECTIVE},
            "strategies": {"type": "array", "items": {"oneOf": [_STRATEGY, _UNAVAILABLE]}},
        }
    ),
}
