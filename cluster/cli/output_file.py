"""Files that a command is to write once it has done its work."""

from pathlib import Path


def check_writable(name: str, file: Path) -> None:
    """Before minutes are spent on what is to be written there; leaves no file behind.

    Raises:
        ValueError: it cannot be written; names the option `name`.
    """
    if not file.parent.is_dir():
        raise ValueError(f"{name} {str(file)!r}: there is no folder {file.parent}")
    was_there = file.exists()
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"{name} {str(file)!r} cannot be written: {error.strerror}") from None
    if not was_there:
        file.unlink()
