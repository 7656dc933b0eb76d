"""Fields whose JSON has more than one form, or whose values we refuse: one function a field.

Each raises ValueError for pydantic, which adds the field's name and the value.
"""


def check_prompt(value: object) -> object:
    """A string, a list of strings, a list of token ids, or a list of such lists; returned as it came."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(type(item) is str for item in value):
            return value
        if all(type(item) is int for item in value):
            return value
        if all(type(item) is list and all(type(token) is int for token in item) for item in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, not empty"
    )


def one_or_many(value: object) -> object:
    """One stop string stands for a list of one."""
    return [value] if isinstance(value, str) else value


def read_logit_bias(value: object) -> object:
    """JSON's keys are strings; ours are token ids."""
    if not isinstance(value, dict):
        return value
    for key in value:
        # 20 digits are beyond any vocabulary and below what int() refuses to read
        if not (key.isascii() and key.isdigit() and len(key) <= 20):
            raise ValueError(f"keys must be token ids, not {key[:40]!r}")
    return {int(key): bias for key, bias in value.items()}


def read_content(value: object) -> str:
    """A message's content: a string, text parts (joined by newlines), or null."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('parts must be {"type": "text", "text": …}; this model takes text only')
        texts.append(part["text"])
    return "\n".join(texts)


def refuse_suffix(value: object) -> None:
    if value not in (None, ""):
        raise ValueError("suffix is not supported")


def check_tools(value: object) -> object:
    if value not in (None, []):
        raise ValueError("tools are not supported")
    return value


def check_response_format(value: object) -> object:
    if value is not None and value != {"type": "text"}:
        raise ValueError('only {"type": "text"} is supported')
    return value
