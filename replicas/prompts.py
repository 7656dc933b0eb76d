"""The forms a prompt may take, and turning each into token ids. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from hybridserve.replicas.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

_KEYS = {"prompt": "a string", "prompt_token_ids": "a list of integers"}


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as the engine takes it; `text` is None when the caller gave ids."""

    text: str | None
    token_ids: list[int]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a list of integers is one prompt.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if prompts and all(_is_integer(item) for item in prompts):
        return [prompts]
    return list(prompts)


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer) -> TokenizedPrompt:
    """Token ids of one prompt.

    Raises:
        ValueError: the prompt has none of the accepted forms, or its text is no Unicode text.
    """
    if isinstance(prompt, Mapping):
        keys = sorted(map(str, prompt))
        if len(keys) != 1 or keys[0] not in _KEYS:
            raise ValueError(f"a prompt given as a dict has one key, {' or '.join(_KEYS)}; got {keys}")
        value = prompt[keys[0]]
        if isinstance(value, str) != (keys[0] == "prompt"):
            raise ValueError(f"{keys[0]} must be {_KEYS[keys[0]]}, got {type(value).__name__}")
        prompt = value
    if isinstance(prompt, str):
        return TokenizedPrompt(prompt, tokenizer.encode(prompt))
    if not isinstance(prompt, Sequence):
        raise ValueError(f"a prompt is a string, token ids or a dict, got {type(prompt).__name__}")
    for at, token_id in enumerate(prompt):
        if not _is_integer(token_id):
            raise ValueError(f"prompt token {at} must be an integer, got {token_id!r}")
    return TokenizedPrompt(None, [int(token_id) for token_id in prompt])


def _is_integer(value: object) -> bool:
    # numpy's integers are integers here; True is not 1
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
