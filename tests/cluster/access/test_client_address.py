"""Whose address it is, behind proxies that are trusted or not."""

import pytest

from hybridserve.cluster.access.client_address import client_address, parse_networks

TRUSTED = parse_networks(["10.0.0.0/8", "fd00::/8", "127.0.0.1"])


@pytest.mark.parametrize(
    ("peer", "headers", "wanted"),
    [
        (None, [b"1.1.1.1"], None),
        ("9.9.9.9", [], "9.9.9.9"),
        ("10.0.0.1", [], "10.0.0.1"),
        # not a proxy of ours: what it says of others is its own invention
        ("9.9.9.9", [b"1.1.1.1"], "9.9.9.9"),
        ("10.0.0.1", [b"1.1.1.1"], "1.1.1.1"),
        # the client wrote the first, our proxy the second
        ("10.0.0.1", [b"6.6.6.6, 1.1.1.1"], "1.1.1.1"),
        ("10.0.0.1", [b"6.6.6.6", b"1.1.1.1, 10.2.3.4"], "1.1.1.1"),
        ("::ffff:10.0.0.1", [b"1.1.1.1"], "1.1.1.1"),
        ("fd00::1", [b"[2001:db8::5]:443"], "2001:db8::5"),
        ("10.0.0.1", [b"1.1.1.1:5000"], "1.1.1.1"),
        ("10.0.0.1", [b"10.0.0.7, 10.0.0.8"], "10.0.0.7"),
        ("10.0.0.1", [b"6.6.6.6, unknown, 10.0.0.8"], "10.0.0.8"),
        ("10.0.0.1", [b"<script>"], "10.0.0.1"),
        ("testclient", [b"1.1.1.1"], "testclient"),
    ],
)
def test_the_nearest_that_is_no_trusted_proxy(peer: str | None, headers: list[bytes], wanted: str) -> None:
    assert client_address(peer, headers, TRUSTED) == wanted
    assert client_address(peer, headers, ()) == peer


def test_a_bad_network_is_named() -> None:
    with pytest.raises(ValueError, match="got '10.0.0.0/33'"):
        parse_networks(["10.0.0.0/8", "10.0.0.0/33"])
