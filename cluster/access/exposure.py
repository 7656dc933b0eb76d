"""Who can reach an HTTP server, and what is said of one that anybody may use."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # a name: who knows what it resolves to
        return False


def open_server_warning(host: str) -> str:
    return (
        f"SECURITY: this server asks for no API keys and listens on {host}: whoever reaches its port may use "
        "it. Set access.keys_file (`hybridserve keys add FILE NAME`), or let it listen "
        "on 127.0.0.1"
    )
