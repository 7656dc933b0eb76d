"""Certificate authorities that live as long as the tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ..authority import Authority


@pytest.fixture
def new_authority(tmp_path: Path) -> Callable[[str], Authority]:
    def make(name: str) -> Authority:
        folder = tmp_path / name
        folder.mkdir()
        return Authority(folder)

    return make
