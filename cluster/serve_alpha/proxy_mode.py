"""Which proxy Serve puts before the ingress, as the environment variables that choose it.

Serve reads them in every process of the cluster, so they have to be set where those start: `hybridserve
serve` does it for the cluster that it starts itself, `hybridserve proxy-env` prints them for others.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from hybridserve.cluster.serve_alpha import edge, preloaded
from hybridserve.cluster.serve_alpha.haproxy_launcher import MAX_CONNECTIONS

ProxyMode = Literal["serve", "haproxy"]

LAUNCHER = "hybridserve-haproxy"
"""The command that Serve runs as HAProxy; see `haproxy_launcher`."""

# Serve's own defaults run user code and handle routers in threads of their own, so that user code may block.
# Ours never does, and on two cores the hops between threads cost 7 ms a unary call and 4 ms a token
_EVERY_MODE = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": edge.IMPORT_PATH,
    # Ray runs its workers, HAProxy with them, at a nice value of 15, as background work that others go before
    "RAY_worker_niceness": "0",
    # what a replica's processes need, in those that are started before there is one; see `spare_workers`. Ray
    # itself would start as many as there are CPUs when the first driver comes
    "RAY_preload_python_modules": preloaded.__name__,
    "RAY_prestart_worker_first_driver": "0",
    # the proxy starts beside engines that load and compile; after 5 s Serve would kill it and start another
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
_MARGIN_S = 60
# of a request, kept until it is answered; larger ones are not sent again. HAProxy copies a buffer of this
# size for every request, whatever its length: with 256 KiB, 64 at once had their first token 20 % later
_KEPT_BYTES = 64 * 1024
_MAX_THREADS = 4
_LEAST_SPARE = 16
# sockets are folder/node_id/admin.sock, a node's id has 56 characters, and HAProxy appends its pid at first
_MAX_SOCKET_PATH = 95
_MAX_FOLDER = _MAX_SOCKET_PATH - len("/admin.sock") - 57


def environment(
    mode: ProxyMode, folder: Path, longest_answer_s: float, ingress_requests: int
) -> dict[str, str]:
    """The variables of `mode`.

    Args:
        folder: where HAProxy's configuration and sockets are to be; used by "haproxy" alone. Who may enter it
            may command HAProxy.
        longest_answer_s: how long an answer may go on after its ingress replicas have changed.
        ingress_requests: as many as one ingress replica may have in flight.

    Raises:
        ValueError: `folder` is relative or too long, or HAProxy's launcher is not installed.
    """
    if mode == "serve":
        return dict(_EVERY_MODE)
    if not folder.is_absolute() or len(str(folder)) > _MAX_FOLDER:
        raise ValueError(
            f"HAProxy's folder {str(folder)!r} must be an absolute path of at most {_MAX_FOLDER} characters: "
            f"its sockets lie below it, and their paths may have {_MAX_SOCKET_PATH}"
        )
    patience = int(longest_answer_s) + _MARGIN_S
    return {
        **_EVERY_MODE,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_launcher()),
        MAX_CONNECTIONS: str(_connections(ingress_requests)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        # a line a request to a socket that only Serve's own metrics read; ours count requests already
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))),
        # no `timeout server`: a long prompt is silent for as long as it takes. A client's silence while it
        # waits for that is not a client that is gone
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(max(3600, patience)),
        # what is left of a HAProxy whose replicas have changed: by default it cuts its streams after 120 s
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(patience),
        # an ingress replica that ends without a byte of an answer: its engines drop what it asked for, so the
        # request may be sent again. Not for ever, should it be the request that ends them
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_RETRIES": "2",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(_KEPT_BYTES),
        # for load balancers that learn of a replica's end by polling; HAProxy is told of it
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    }


def _connections(ingress_requests: int) -> int:
    """That HAProxy has with one ingress replica: some more than may be in flight, for those it refuses.

    All others wait in HAProxy. An ingress replica that is given a flood at once handles all of it in each
    turn of its loop, and those that it admits wait for as many turns as they have steps.
    """
    return ingress_requests + max(_LEAST_SPARE, ingress_requests // 4)


def _launcher() -> Path:
    """The launcher beside this Python, or on the PATH; absolute."""
    beside = Path(sys.executable).parent / LAUNCHER
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(LAUNCHER)
    if found is None:
        raise ValueError(
            f"there is no {LAUNCHER} beside {sys.executable} or on the PATH; "
            "installing this package puts it there"
        )
    return Path(found).absolute()


def running() -> ProxyMode:
    """What stands before the ingress in this process' Serve."""
    return "haproxy" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "serve"


def check(mode: ProxyMode, ingress_requests: int) -> None:
    """Raise RuntimeError unless this process' Serve is in `mode`, and gives an ingress replica so many
    requests."""
    if mode == "haproxy" and running() != mode:
        raise RuntimeError(
            "ingress.proxy is haproxy, but this Serve runs without HAProxy: use `hybridserve serve`, or set "
            "what `hybridserve proxy-env` prints where the cluster's processes start"
        )
    most = int(os.environ.get(MAX_CONNECTIONS, ingress_requests))
    if mode == "haproxy" and most < ingress_requests:
        raise RuntimeError(
            f"serving.max_concurrent_requests lets an ingress replica have {ingress_requests} requests, but "
            f"HAProxy was started to give it {most} at most; start the cluster again with what "
            "`hybridserve proxy-env` prints now"
        )
