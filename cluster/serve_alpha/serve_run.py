"""`serve run CONFIG`, but stopped gently: the child process of `hybridserve serve`.

Serve's own ends its proxies first, and with them every answer in progress. Here, at SIGINT, the ingress
replicas are told first: they refuse what is new, let what is there go on for a while, and then end it with an
error that clients understand. A second SIGINT stops at once.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from ray import serve
from ray.exceptions import RayError
from ray.serve import scripts
from ray.serve.exceptions import RayServeException

from hybridserve.cluster.ingress.deployment import INGRESS_NAME
from hybridserve.cluster.serve_file import read_application

# beyond the limit: an ingress replica tells those that it cuts off, and answers
_ANSWER_S = 10.0
# what was told last is on its way through the proxies
_FLUSH_S = 0.5


def drain(app_name: str, limit_s: float) -> None:
    """Have the application's ingress replicas end what is in flight; errors are told, and end nothing."""
    _say(
        f"stopping: new requests are refused, answers in progress may go on for {limit_s:g} s "
        "(once more: stop at once)"
    )
    try:
        response = serve.get_deployment_handle(INGRESS_NAME, app_name).broadcast("stop", limit_s)
        ended = response.results(timeout_s=limit_s + _ANSWER_S, return_exceptions=True)
    except (RayError, RayServeException, TimeoutError) as error:
        _say(f"the ingress replicas could not be told to stop: {type(error).__name__}: {error}")
        return
    cut = [one for one in ended if isinstance(one, int)]
    _say(f"{sum(cut)} answers were cut off")
    if len(cut) < len(ended):
        _say(f"{len(ended) - len(cut)} of {len(ended)} ingress replicas could not be told to stop")
    time.sleep(_FLUSH_S)


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
        if args.drain_s:
            drain(str(application.get("name", "default")), args.drain_s)
    except KeyboardInterrupt:
        _say("stopping at once")
    serve.shutdown()


if __name__ == "__main__":
    main()
