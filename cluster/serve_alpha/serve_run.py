"""`serve run CONFIG`, but stopped gently: the child process of `hybridserve serve`.

Serve's own ends its proxies first, and with them every answer in progress. Here, at SIGINT, the ingress
replicas are told first: they refuse what is new, let what is there go on for a while, and then end it with an
error that clients understand. A second SIGINT kills what this process started: Serve's own end takes seconds.
"""

import argparse
import asyncio
import signal
import sys
import threading
from pathlib import Path

import click
import ray
from ray import serve
from ray.serve import scripts
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ReplicaState

from hybridserve.cluster.ingress.deployment import INGRESS_NAME
from hybridserve.cluster.interrupts import Interrupts
from hybridserve.cluster.serve_alpha.broadcast import AllReplicas
from hybridserve.cluster.serve_file import read_application

# beyond the limit: an ingress replica tells those that it cuts off, and answers
_ANSWER_S = 10.0
# what was told last is on its way through the proxies
_FLUSH_S = 0.5
# a message to a controller that is there takes milliseconds
_TELL_S = 2.0


def ingress_runs(app_name: str) -> bool:
    """Whether there is anybody to be told; not while the application starts, or when it could not."""
    application = serve.status().applications.get(app_name)
    deployment = None if application is None else application.deployments.get(INGRESS_NAME)
    return deployment is not None and deployment.replica_states.get(ReplicaState.RUNNING, 0) > 0


async def drain(app_name: str, limit_s: float) -> None:
    """Have the application's ingress replicas end what is in flight."""
    _say(
        f"stopping: new requests are refused, answers in progress may go on for {limit_s:g} s "
        "(once more: stop at once)"
    )
    ended = await AllReplicas(INGRESS_NAME, app_name, "stop").ask(limit_s + _ANSWER_S, limit_s)
    _say(f"{len(ended)} ingress replicas are done; {sum(ended)} answers were cut off")
    await asyncio.sleep(_FLUSH_S)


async def end(app_name: str, limit_s: float) -> None:
    """Shut Serve down once what is in flight has ended; without a limit, now."""
    try:
        if limit_s and ingress_runs(app_name):
            await drain(app_name, limit_s)
    finally:
        # on the loop that the handle to the ingress replicas was used on
        await serve.shutdown_async()


def at_once(own_cluster: bool) -> None:
    """What is to be said, and to be done where the cluster is not this process' own and lives on."""
    _say("stopped at once")
    if not own_cluster and ray.is_initialized():
        # calls to an actor that is not there may take for ever
        thread = threading.Thread(target=_tell_serve_to_end, daemon=True)
        thread.start()
        thread.join(2 * _TELL_S)


def _tell_serve_to_end() -> None:
    """It ends by itself then, whether this process lives or not."""
    try:
        client = _get_global_client()
    except RayServeException:
        # it has ended already
        return
    ray.wait([client._controller.graceful_shutdown.remote(wait=False)], timeout=_TELL_S)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Ends with Serve's exit code where it could not start, with 130 at a second SIGINT, else with 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--drain-s", type=float, required=True)
    args = parser.parse_args()
    _, application = read_application(args.config)
    Interrupts(at_once)
    try:
        # shuts down by itself, and exits, when it is interrupted or fails
        scripts.cli.main(["run", "--non-blocking", str(args.config)], standalone_mode=False)
        while True:
            signal.pause()
    except click.Abort:
        # click's word for an interrupt where Serve does not look for one: it has started nothing yet
        return
    except KeyboardInterrupt:
        pass
    asyncio.run(end(str(application.get("name", "default")), args.drain_s))


if __name__ == "__main__":
    main()
