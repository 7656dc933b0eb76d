"""What Serve's own HTTP servers are told: which headers a client may not send them.

Serve reads these headers before the ingress' application sees a request, so the application cannot drop them.
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares`, which Serve then calls in its proxy and,
behind HAProxy, in every ingress replica.
"""

from starlette.middleware import Middleware

from hybridserve.cluster.ingress.limits import DropHeaders

IMPORT_PATH = f"{__name__}:middlewares"


def middlewares() -> list[Middleware]:
    """Called by Serve when one of its HTTP servers starts."""
    return [Middleware(DropHeaders)]
