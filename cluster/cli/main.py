"""The command line, `hybridserve`. Owns the list of commands and how errors reach the terminal.

What the user got wrong is one line on stderr and exit status 1 (2 for a malformed command line), never a
traceback. Importing this imports no torch: `--help` and `inspect` answer at once.
"""

import sys

import typer

from hybridserve.cluster.cli.bench import bench
from hybridserve.cluster.cli.generate import generate
from hybridserve.cluster.cli.inspect import inspect
from hybridserve.cluster.cli.keys import keys
from hybridserve.cluster.cli.plan import plan
from hybridserve.cluster.cli.serve import proxy_env, serve
from hybridserve.cluster.cli.simulate import simulate
from hybridserve.cluster.cli.update import update

app = typer.Typer(
    help="Serve hybrid-attention language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(inspect)
app.command()(plan)
app.command()(serve)
app.command()(proxy_env)
app.command()(simulate)
app.command()(update)
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")


def main() -> None:
    """Run the command line of this process."""
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
