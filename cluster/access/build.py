"""From the section `access` to what one ingress replica goes by: files opened, threads started."""

from pathlib import Path

from hybridserve.cluster.access.audit import open_audit
from hybridserve.cluster.access.gate import Access
from hybridserve.cluster.access.key_file import KeyFile
from hybridserve.cluster.access.key_limits import KeyLimiter
from hybridserve.cluster.access.options import ALWAYS_OPEN, AccessSettings


def open_access(settings: AccessSettings, num_ingress: int) -> Access:
    """One of `num_ingress` ingress replicas' own.

    Raises:
        ValueError: the keys file cannot be used.
    """
    keys = None
    if settings.keys_file is not None:
        keys = KeyFile(Path(settings.keys_file))
        keys.start()
    return Access(
        keys=keys,
        limiter=KeyLimiter(num_ingress),
        audit=None if settings.audit is None else open_audit(settings.audit),
        keeps_text=settings.audit is not None and settings.audit.prompts,
        open_paths=ALWAYS_OPEN | set(settings.open_paths),
        networks=settings.networks,
    )
