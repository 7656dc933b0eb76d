"""The section `access` of a deployment's YAML. Knows nothing of how its words are carried out."""

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from hybridserve.cluster.access.client_address import parse_networks
from hybridserve.cluster.sizes import parse_size

STDOUT = "stdout"
ALWAYS_OPEN = frozenset(("/health", "/ready"))
"""What load balancers and supervisors ask, without a key: neither says anything of a model or a user."""


def _read_size(value: object, info: ValidationInfo) -> object:
    return parse_size(str(info.field_name), value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_read_size), Field(gt=0)]
NonEmpty = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AuditSettings(_Section):
    """The audit log."""

    path: NonEmpty
    """A file of JSON lines, shared by a node's ingress replicas; "stdout" for the process' own output."""
    prompts: bool = False
    """Write requests' bodies and answers' texts too."""
    rotate_bytes: Size = 64 * 2**20
    """A larger file is renamed to `path.1`, that to `path.2`, and so on."""
    max_files: Annotated[int, Field(ge=1, le=1000, strict=True)] = 8
    """With the one that is being written; the oldest goes."""


class BusTls(_Section):
    """Certificates of the token bus: both ends show one, and trust what `cafile` signed and nothing else.

    The paths are the same on every node. Names in certificates are not compared with addresses: whoever has a
    certificate of this authority is a member, so it must sign for nothing else.
    """

    certfile: NonEmpty
    keyfile: NonEmpty
    cafile: NonEmpty


class AccessSettings(_Section):
    """Who may use the server, and what is written down of it."""

    keys_file: NonEmpty | None = None
    """API keys' hashes (`hybridserve keys`); without it anybody may use the server."""
    open_paths: tuple[Annotated[str, Field(pattern=r"^/")], ...] = ()
    """Paths that need no key, beside /health and /ready, which never do."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks whose X-Forwarded-For is believed."""
    audit: AuditSettings | None = None
    bus_tls: BusTls | None = None

    @field_validator("trusted_proxies")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_networks(value)
        return value

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        return parse_networks(self.trusted_proxies)

    def resolved(self, base: Path) -> "AccessSettings":
        """With relative paths made absolute against `base`."""

        def absolute(path: str) -> str:
            return str((base / Path(path).expanduser()).absolute())

        changed: dict[str, object] = {}
        if self.keys_file is not None:
            changed["keys_file"] = absolute(self.keys_file)
        if self.audit is not None and self.audit.path != STDOUT:
            changed["audit"] = self.audit.model_copy(update={"path": absolute(self.audit.path)})
        if self.bus_tls is not None:
            files = {name: absolute(path) for name, path in self.bus_tls.model_dump().items()}
            changed["bus_tls"] = BusTls(**files)
        return self.model_copy(update=changed)
