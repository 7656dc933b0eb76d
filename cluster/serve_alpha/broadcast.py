"""Asking every replica of a deployment the same, through Serve's broadcast."""

import logging
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

logger = logging.getLogger(__name__)


class AllReplicas:
    """Calls one method of all replicas of a deployment, the caller's own among them.

    Args:
        method: its name.
    """

    def __init__(self, deployment: str, app_name: str, method: str) -> None:
        self._deployment = deployment
        self._app_name = app_name
        self._method = method
        self._handle: serve.handle.DeploymentHandle | None = None

    async def ask(self, timeout_s: float, *args: object) -> list[Any]:
        """The answers that came; none when one replica keeps the others waiting, or there is no replica."""
        try:
            if self._handle is None:
                # not in the constructor: the caller may be a replica that Serve does not know to run yet
                self._handle = serve.get_deployment_handle(self._deployment, self._app_name)
            response = self._handle.broadcast(self._method, *args)
            answers = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError, KeyError) as error:
            # a KeyError is Serve's word for a deployment that there is not, or not yet
            logger.warning("%s of all replicas of %s failed: %s", self._method, self._deployment, error)
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]
