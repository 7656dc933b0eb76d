"""API keys as they are kept: by hash, with a name, an end and limits; and who a presented key belongs to.

Keys are 32 random bytes, so their SHA-256 gives nothing away and a slow hash (bcrypt, Argon2) would buy
nothing: those stretch passwords that can be guessed, and 2**256 keys cannot. They would cost every request
milliseconds, and let anybody without a key spend the server's time.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from hybridserve.cluster.routing.admission import Priority

PREFIX = "hs-"
"""Of keys that we make, so that scanners of repositories and logs can find them."""
MAX_LIVE_KEYS = 2
"""Of one name: the old and the new one of a rotation."""
_KEY_BYTES = 32
_LONGEST_KEY = 512
_INDEX_BYTES = 8

PositiveInt = Annotated[int, Field(gt=0, strict=True)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KeyLimits(_Section):
    """What one name may use; None is without a limit."""

    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    """Of prompts and answers together."""
    max_concurrent: PositiveInt | None = None
    """Requests in flight."""


class KeyEntry(_Section):
    """One key of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    """Of the user; two live keys may share it, and its limits."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the key's text, in lowercase hex."""
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    """The first moment at which it is not valid any more."""
    limits: KeyLimits = KeyLimits()
    priority: Priority = "high"
    """The highest that its requests may ask for."""

    @property
    def key_id(self) -> str:
        """Tells one name's keys apart where the key itself must not be shown."""
        return self.sha256[:8]

    def is_live(self, now: datetime) -> bool:
        return self.expires is None or now < self.expires


@dataclass(frozen=True)
class Expired:
    """A key that was valid once."""

    entry: KeyEntry


class Keyring:
    """All keys of a file at one time."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        self.entries = tuple(entries)
        self._by_index: dict[bytes, list[tuple[bytes, KeyEntry]]] = {}
        for entry in self.entries:
            digest = bytes.fromhex(entry.sha256)
            self._by_index.setdefault(digest[:_INDEX_BYTES], []).append((digest, entry))

    def find(self, key: bytes, now: datetime) -> KeyEntry | Expired | None:
        """Whose key that is; None when it is nobody's.

        How long the look-up by the digest's first bytes takes tells nothing that helps: who could steer a
        digest by a clock would have to invert SHA-256. The rest is compared in constant time.
        """
        if len(key) > _LONGEST_KEY:
            return None
        digest = hashlib.sha256(key).digest()
        for known, entry in self._by_index.get(digest[:_INDEX_BYTES], ()):
            if hmac.compare_digest(known, digest):
                return entry if entry.is_live(now) else Expired(entry)
        return None


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_key(key: str) -> str:
    """What the file has of a key."""
    return hashlib.sha256(key.encode()).hexdigest()
