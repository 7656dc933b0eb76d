"""The header by which a client says how urgent its request is."""

from starlette.requests import Request

from hybridserve.cluster.ingress.errors import brief, invalid
from hybridserve.cluster.routing.admission import PRIORITIES, Priority

HEADER = "x-hybridserve-priority"


def read_priority(request: Request) -> Priority:
    """The request's priority, "normal" without the header.

    Raises:
        ApiError: 400, when the header has another word.
    """
    given = request.headers.get(HEADER, "normal").strip().lower()
    for priority in PRIORITIES:
        if given == priority:
            return priority
    raise invalid(HEADER, f"{HEADER} must be one of {', '.join(PRIORITIES)}, got {brief(given)}")
