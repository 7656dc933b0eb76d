"""`hybridserve update CONFIG`: a rolling update of what is deployed, that goes back when it fails."""

from pathlib import Path
from typing import Annotated

import typer

from hybridserve.cluster.plan import check_shards
from hybridserve.cluster.serve_file import read_application
from hybridserve.cluster.settings_reading import parse_settings
from hybridserve.cluster.update import Update, UpdateFailed

_ADDRESS = "http://127.0.0.1:8265"


def update(
    config: Annotated[Path, typer.Argument(help="Serve YAML with the new version of the application.")],
    address: Annotated[
        str, typer.Option(help="The cluster's dashboard.", envvar="RAY_DASHBOARD_ADDRESS")
    ] = _ADDRESS,
    timeout: Annotated[
        float, typer.Option(help="Seconds for all replicas to be of the new version.", min=1)
    ] = 1800.0,
) -> None:
    """Update a deployed application: new replicas first, back to the old version when they fail."""
    _, application = read_application(config)
    settings = parse_settings(application.get("args", {}))
    for spec in settings.pool_specs():
        settings.engine_config("cpu", spec)
    if Path(settings.model.path).exists():
        # elsewhere it is a path of the cluster's nodes
        check_shards(settings)
    # imported late: it takes Ray, and a mistake in the file is to be told at once
    from hybridserve.cluster.serve_alpha.serve_rest import ServeRest

    try:
        serve = ServeRest(address)
    except ConnectionError as error:
        raise ValueError(f"--address {address}: no dashboard answers there: {error}") from None
    try:
        Update(serve, application, timeout, typer.echo).run()
    except UpdateFailed as failed:
        raise ValueError(f"the update failed: {failed}") from None
