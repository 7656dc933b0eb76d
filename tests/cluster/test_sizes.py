import pytest

from hybridserve.cluster.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("500MB", 500_000_000), ("1.5 gib", 3 * 2**29), ("4096", 4096), (" 7 B ", 7)],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size("memory", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 GiBs", "-1GB", "1e3", "0GiB", "0.0001KiB"])
def test_parse_size_names_option_and_value(text: str) -> None:
    with pytest.raises(ValueError, match=f"memory must be .*{text}"):
        parse_size("memory", text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (54_000_000, "51.5 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (500 * 2**40, "500 TiB"),
    ],
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text
