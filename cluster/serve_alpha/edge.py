"""What Serve's own HTTP servers do for us: cut headers off, and outlive ingress replicas that end.

Serve reads some headers before the ingress' application sees a request, so the application cannot drop them.
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares`, which Serve then calls in its proxy and,
behind HAProxy, in every ingress replica.
"""

import os

from starlette.middleware import Middleware

from hybridserve.cluster.ingress.failover import IngressFailover
from hybridserve.cluster.ingress.limits import DropHeaders

IMPORT_PATH = f"{__name__}:middlewares"


def middlewares() -> list[Middleware]:
    """Called by Serve when one of its HTTP servers starts; the first one is the innermost."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        # HAProxy sends requests again itself; within an ingress replica nothing outlives it
        return [Middleware(DropHeaders)]
    return [Middleware(IngressFailover), Middleware(DropHeaders)]
