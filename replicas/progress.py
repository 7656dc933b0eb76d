"""Progress bars on stderr, for people who wait: loading weights, answering prompts.

Owns how they look. Nothing is drawn when stderr is not a terminal, but the last state is printed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LoadProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights are read."""
AnswerProgress = Callable[[int, int], None]
"""Called with (answers finished, tokens generated) since the last call."""


@contextmanager
def weight_progress() -> Iterator[LoadProgress]:
    """A bar over the bytes of the weights, from the first ones on: whatever fails before them draws none."""
    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=Console(stderr=True))

    def update(done: int, total: int) -> None:
        if not progress.tasks:
            progress.add_task("")
            progress.start()
        progress.update(progress.tasks[0].id, completed=done, total=total)

    try:
        yield update
    finally:
        if progress.tasks:
            progress.stop()


@contextmanager
def answer_progress(total: int) -> Iterator[AnswerProgress]:
    """A bar over `total` answers, with the rate of generated tokens."""
    rate = TextColumn("{task.fields[tokens]} tokens")
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        rate,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, tokens=0)
        tokens = 0

        def advance(finished: int, generated: int) -> None:
            nonlocal tokens
            tokens += generated
            progress.update(task, advance=finished, tokens=tokens)

        yield advance
