"""`serve run CONFIG`, but stopped gently: the child process of `hybridserve serve`.

Serve's own ends its proxies first, and with them every answer in progress. Here, at SIGINT, the ingress
replicas are told first: they refuse what is new, let what is there go on for a while, and then end it with an
error that clients understand. A second SIGINT stops at once.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from ray import serve
from ray.serve import scripts
from ray.serve.schema import ReplicaState

from hybridserve.cluster.ingress.deployment import INGRESS_NAME
from hybridserve.cluster.serve_alpha.broadcast import AllReplicas
from hybridserve.cluster.serve_file import read_application

# beyond the limit: an ingress replica tells those that it cuts off, and answers
_ANSWER_S = 10.0
# what was told last is on its way through the proxies
_FLUSH_S = 0.5


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
    """Shut Serve down once what is in flight has ended; at once without a limit, or when cancelled."""
    try:
        if limit_s and ingress_runs(app_name):
            await drain(app_name, limit_s)
    finally:
        # on the loop that the handle to the ingress replicas was used on
        await serve.shutdown_async()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Ends with Serve's exit code where it could not start, else with 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--drain-s", type=float, required=True)
    args = parser.parse_args()
    _, application = read_application(args.config)
    try:
        # shuts down by itself, and exits, when it is interrupted or fails
        scripts.cli.main(["run", "--non-blocking", str(args.config)], standalone_mode=False)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        pass
    try:
        asyncio.run(end(str(application.get("name", "default")), args.drain_s))
    except KeyboardInterrupt:
        _say("stopped at once")


if __name__ == "__main__":
    main()
