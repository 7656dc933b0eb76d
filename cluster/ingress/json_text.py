"""JSON in and out of the ingress: strict about what comes in, compact in what goes out."""

import json
from json.encoder import encode_basestring as _encode_string

_encoder = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False)


def to_json(value: object) -> bytes:
    """Compact UTF-8. Raises ValueError on NaN and infinities, which JSON does not have."""
    return _encoder.encode(value).encode("utf-8", "replace")


def string_to_json(text: str) -> bytes:
    """What `to_json` makes of a string, in a tenth of its time."""
    return _encode_string(text).encode("utf-8", "replace")


def from_json(body: bytes) -> object:
    """Parse a request body.

    NaN and Infinity are let through, so that the field that holds one can be named.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, or text with a lone surrogate.
    """
    try:
        text = body.decode("utf-8")
        value = json.loads(text)
        # only an escape can make a lone surrogate, which no tokenizer takes
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not valid UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value
