"""Serve's REST interface, at the dashboard of a cluster: what `serve deploy` and `serve status` talk to."""

from typing import Any

from ray.dashboard.modules.serve.sdk import ServeSubmissionClient


class ServeRest:
    """What is deployed on a cluster, and the way to change it.

    Args:
        address: of the cluster's dashboard, like "http://127.0.0.1:8265".

    Raises:
        ConnectionError: nobody answers there.
        ValueError: `address` is none.
    """

    def __init__(self, address: str) -> None:
        self._client = ServeSubmissionClient(address)

    def details(self) -> dict[str, Any]:
        """Serve's details: applications, their configurations, deployments and replicas."""
        return self._client.get_serve_details()

    def deploy(self, config: dict[str, Any]) -> None:
        """Make these applications, and no others, the ones that are served.

        Raises:
            RuntimeError: Serve does not take the configuration.
        """
        self._client.deploy_applications(config)
