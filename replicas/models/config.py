"""Reads a checkpoint folder's `config.json` and `generation_config.json`, or a shape file. Torch-free.

A shape file is YAML or JSON with the keys of a `config.json`, without weights beside it. Owns finding the
files, overrides, and the choice of a parser by `model_type`. What a model type's keys mean is in that type's
own parser; transformers' config classes are not used, so that its version never decides which models can be
served.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridserve.parallel.weights.index import read_weight_map
from hybridserve.replicas.models.fields import Fields
from hybridserve.replicas.models.qwen3_5_config import parse_qwen3_5, parse_qwen3_5_text
from hybridserve.replicas.models.specs import ModelConfig

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SHAPE_SUFFIXES = (".yaml", ".yml", ".json")

Parser = Callable[[Fields, Collection[str], tuple[int, ...]], ModelConfig]
"""(config, names of the checkpoint's tensors, further end-of-sequence ids) -> model config."""

PARSERS: dict[str, Parser] = {
    "qwen3_5_text": parse_qwen3_5_text,
    "qwen3_5": parse_qwen3_5,
}


def load_model_config(path: str | Path, hf_overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model in the folder `path`, or in the shape file `path`.

    `hf_overrides` replaces keys of `config.json`; objects are merged, and a key that only `text_config` has
    is replaced there.

    Raises:
        ValueError: the folder or file is missing or malformed, or a key is missing, ill-typed,
            contradictory or unsupported; the message names it and its value.
    """
    if is_shape_file(path):
        return parse_model_config(override(read_mapping(Path(path)), hf_overrides or {}), str(path))
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"model folder {folder} does not exist")
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"no {CONFIG_FILE} in model folder {folder}")
    values = override(read_json(folder / CONFIG_FILE), hf_overrides or {})
    further_eos: tuple[int, ...] = ()
    if (folder / GENERATION_FILE).is_file():
        generation = Fields(read_json(folder / GENERATION_FILE), str(folder / GENERATION_FILE))
        further_eos = generation.token_ids("eos_token_id")
    return parse_model_config(values, str(folder / CONFIG_FILE), read_weight_map(folder), further_eos)


def is_shape_file(path: str | Path) -> bool:
    """Whether `path` is written as a shape file is: it ends in .yaml, .yml or .json and is no folder."""
    return Path(path).suffix in SHAPE_SUFFIXES and not Path(path).is_dir()


def check_load_format(path: str | Path, load_format: str) -> None:
    """Raise ValueError for a shape file whose weights are to be read: it has none."""
    if load_format != "dummy" and is_shape_file(path):
        raise ValueError(
            f"load_format is {load_format!r}, but {path} is a shape without weights: use 'dummy'"
        )


def parse_model_config(
    values: Mapping[str, Any],
    where: str,
    tensor_names: Collection[str] = (),
    further_eos: tuple[int, ...] = (),
) -> ModelConfig:
    """The model described by the keys of a `config.json`; `where` names them in messages.

    `tensor_names` are the checkpoint's, empty when there is none: they settle the weights' prefix, whether
    the head is tied, and layer types that the config leaves out.
    """
    fields = Fields(values, where)
    model_type = fields.text("model_type")
    parser = PARSERS.get(model_type)
    if parser is None:
        supported = ", ".join(sorted(PARSERS))
        raise ValueError(f"model_type {model_type!r} in {where} is not supported; supported: {supported}")
    return parser(fields, tensor_names, further_eos)


def load_generation_defaults(path: str | Path) -> dict[str, Any]:
    """Sampling defaults of the folder's `generation_config.json`; empty without that file.

    Keys, each only if the file has it: temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens,
    eos_token_id (a tuple). `do_sample: false` gives temperature 0, whatever temperature says.

    Raises:
        ValueError: the file is no JSON object or a value is ill-typed; names file, key and value.
    """
    file = Path(path) / GENERATION_FILE
    if not file.is_file():
        return {}
    fields = Fields(read_json(file), str(file))
    defaults: dict[str, Any] = {}
    for key in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if fields.has(key):
            defaults[key] = fields.number(key)
    if fields.has("top_k"):
        top_k = fields.values["top_k"]
        # 0 and -1 mean "all" in one tool or the other
        defaults["top_k"] = top_k if top_k in (0, -1) else fields.positive("top_k")
    if fields.has("max_new_tokens"):
        defaults["max_new_tokens"] = fields.positive("max_new_tokens")
    if fields.has("eos_token_id"):
        defaults["eos_token_id"] = fields.token_ids("eos_token_id")
    if not fields.flag("do_sample", True):
        defaults["temperature"] = 0.0
    return defaults


def override(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `overrides` in place of its keys."""
    result = dict(values)
    for key, value in overrides.items():
        inner = result.get("text_config")
        if key not in result and isinstance(inner, Mapping) and key in inner:
            result["text_config"] = {**inner, key: value}
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = override(result[key], value)
        else:
            result[key] = value
    return result


def read_mapping(file: Path) -> dict[str, Any]:
    """The keys of a shape file.

    Raises:
        ValueError: it is missing, not valid YAML or JSON, or no mapping of strings.
    """
    if not file.is_file():
        raise ValueError(f"model shape {file} does not exist")
    if file.suffix == ".json":
        return read_json(file)
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{file} must hold the keys of a {CONFIG_FILE}, got {values!r:.100}")
    return values


class _Loader(yaml.SafeLoader):
    """With the floats of YAML 1.2: to the library's 1.1, `1e-6` is a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        ValueError: it is not JSON, or not an object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(values).__name__}")
    return values
