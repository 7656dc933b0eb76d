"""What the tests of surviving share: a way to report what was lost, and how long it took."""

import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[..., None]:
    """report(failed=0, seconds=1.2): kept with the test's result, and shown with `-s` or when it fails."""

    def say(**facts: float) -> None:
        request.node.user_properties.extend(facts.items())
        shown = ", ".join(
            f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
            for name, value in facts.items()
        )
        sys.stdout.write(f"\n{request.node.name}: {shown}\n")

    return say
