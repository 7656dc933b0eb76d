"""From a deployment's YAML `args` to settings, and what is wrong with them in the YAML's own words.

What a user may write, and its bounds, is in `settings` and `settings_sections`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from hybridserve.cluster.access.key_file import read_keys
from hybridserve.cluster.settings import AppSettings, describe_error
from hybridserve.cluster.settings_sections import ModelSettings
from hybridserve.replicas.models.config import is_shape_file


def in_settings_words(message: str) -> str:
    """An engine's message with its options' names as they stand in the YAML."""
    words = {
        "cache_memory_bytes": "serving.cache_memory",
        "gpu_memory_utilization": "serving.gpu_memory_utilization",
        "max_model_len": "model.max_context_length",
        "max_num_batched_tokens": "serving.max_num_batched_tokens",
        "max_num_seqs": "serving.max_batch_size",
        "tensor_parallel_size": "parallel.tensor_parallel_size",
    }
    return re.sub(rf"\b({'|'.join(words)})\b", lambda found: words[found[0]], message)


def parse_settings(args: object) -> AppSettings:
    """Settings from YAML `args`; the model's path is not looked at.

    Raises:
        ValueError: a key is unknown, missing or has a bad value; each is named.
    """
    if not isinstance(args, Mapping):
        raise ValueError(f"bad configuration: args must be a mapping of keys to values, got {args!r}")
    try:
        return AppSettings.model_validate(dict(args))
    except ValidationError as error:
        raise ValueError("bad configuration: " + "; ".join(map(describe_error, error.errors()))) from None


def load_settings(args: object, base: Path) -> AppSettings:
    """Settings from YAML `args`, the paths of model and tokenizer made absolute against `base`.

    Raises:
        ValueError: a key is unknown, missing or has a bad value (each is named), the model is not there, or
            the file of API keys cannot be used.
    """
    settings = parse_settings(args)
    try:
        model = _resolved_model(settings.model, base)
    except ValueError as error:
        raise ValueError(f"bad configuration: {error}") from None
    access = settings.access.resolved(base)
    if access.keys_file is not None:
        try:
            read_keys(Path(access.keys_file))
        except ValueError as error:
            raise ValueError(f"bad configuration: {error}") from None
    return settings.model_copy(update={"model": model, "access": access})


def _resolved_model(model: ModelSettings, base: Path) -> ModelSettings:
    """With absolute paths. Raises ValueError when the model or its tokenizer is not there."""
    path = (base / Path(model.path).expanduser()).resolve()
    if path.is_file():
        if not is_shape_file(path):
            raise ValueError(
                f"model.path {model.path!r} is a file, and neither a checkpoint's folder nor a shape"
            )
        if model.load_format != "dummy":
            raise ValueError(
                f"model.path {model.path!r} is a shape without weights: set model.load_format to dummy for "
                f"random ones, got {model.load_format!r}"
            )
        if model.tokenizer is None:
            raise ValueError(
                f"model.path {model.path!r} is a shape, which has no tokenizer: model.tokenizer must name a "
                "folder that has one"
            )
    elif not (path / "config.json").is_file():
        raise ValueError(f"model.path {model.path!r}: there is no {path}/config.json")
    if model.tokenizer is None:
        return model.model_copy(update={"path": str(path)})
    tokenizer = (base / Path(model.tokenizer).expanduser()).resolve()
    if not (tokenizer / "tokenizer.json").is_file():
        raise ValueError(f"model.tokenizer {model.tokenizer!r}: there is no {tokenizer}/tokenizer.json")
    return model.model_copy(update={"path": str(path), "tokenizer": str(tokenizer)})
