"""Whose request it is, by address, when proxies stand in between. Knows nothing of keys."""

import ipaddress
from collections.abc import Iterable, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Networks or single addresses. Raises ValueError naming the one that is neither."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ValueError(
                f"must be addresses or networks like 10.0.0.0/8, got {text!r} ({error})"
            ) from None
    return tuple(found)


def client_address(
    peer: str | None, forwarded_for: Sequence[bytes], trusted: Sequence[Network]
) -> str | None:
    """The nearest address that is no trusted proxy's.

    A proxy appends who it was called by to X-Forwarded-For, so only the part to the right of the first
    address that is not trusted is worth anything: a client can write what it likes before it.

    Args:
        peer: the other end of the connection, or what the HTTP server took for it.
        forwarded_for: the header's values, in their order.
        trusted: networks of proxies.
    """
    if peer is None or not forwarded_for or not _is_within(peer, trusted):
        return peer
    hops = b",".join(forwarded_for).decode("latin-1").split(",")
    nearest = peer
    for hop in reversed(hops):
        address = _without_port(hop.strip())
        if address is None:
            # what a proxy did not write ends what is known
            return nearest
        nearest = address
        if not _is_within(address, trusted):
            return address
    return nearest


def _is_within(address: str, networks: Sequence[Network]) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    # a socket of both families shows IPv4 peers as ::ffff:10.0.0.1
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return any(parsed in network for network in networks)


def _without_port(text: str) -> str | None:
    """The address of "1.2.3.4", "1.2.3.4:5", "::1" or "[::1]:5"; None when it is none."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
