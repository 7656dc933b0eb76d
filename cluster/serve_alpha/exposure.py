"""Whether Serve's HTTP server can be reached from other machines: its controller knows where it listens."""

import asyncio
import logging

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from hybridserve.cluster.access.exposure import is_loopback, open_server_warning

_ASK_S = 5.0

logger = logging.getLogger("ray.serve")


async def warn_if_exposed() -> None:
    """Say it loudly when a server that asks for no keys listens on more than this machine's loopback."""
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        async with asyncio.timeout(_ASK_S):
            options = await controller.get_http_config.remote()
    except (RayError, TimeoutError, ValueError) as error:
        logger.warning("where the HTTP server listens is not known: %s", error)
        return
    if options.host is not None and not is_loopback(options.host):
        logger.warning(open_server_warning(options.host))
