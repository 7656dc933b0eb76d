"""From a deployment's YAML `args` to settings, and what is wrong with them in the YAML's own words.

What a user may write, and its bounds, is in `settings` and `settings_sections`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from hybridserve.cluster.access.key_file import read_keys
from hybridserve.cluster.settings import AppSettings, describe_error


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
    """Settings from YAML `args`, the model's path made absolute against `base`.

    Raises:
        ValueError: a key is unknown, missing or has a bad value (each is named), the model is not there, or
            the file of API keys cannot be used.
    """
    settings = parse_settings(args)
    path = (base / Path(settings.model.path).expanduser()).resolve()
    if path.is_file():
        raise ValueError(
            f"bad configuration: model.path {settings.model.path!r} is a file; a server needs the folder of "
            "a checkpoint, with its tokenizer"
        )
    if not (path / "config.json").is_file():
        raise ValueError(
            f"bad configuration: model.path {settings.model.path!r}: there is no {path}/config.json"
        )
    model = settings.model.model_copy(update={"path": str(path)})
    access = settings.access.resolved(base)
    if access.keys_file is not None:
        try:
            read_keys(Path(access.keys_file))
        except ValueError as error:
            raise ValueError(f"bad configuration: {error}") from None
    return settings.model_copy(update={"model": model, "access": access})
