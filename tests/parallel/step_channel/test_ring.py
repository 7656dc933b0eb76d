"""Messages through the ring, both ends in one process."""

import random
import threading

import pytest

from hybridserve.parallel.step_channel.ring import NUM_SLOTS, SLOT_BYTES, RingReader, RingWriter, ring_bytes


def ring(size: int) -> tuple[memoryview, RingWriter, list[RingReader]]:
    memory = memoryview(bytearray(ring_bytes(size)))
    return memory, RingWriter(memory, size), [RingReader(memory, rank, size) for rank in range(1, size)]


def test_every_reader_gets_every_message_in_order() -> None:
    _, writer, readers = ring(4)
    rng = random.Random(1)
    messages = [rng.randbytes(rng.randrange(1, 2000)) for _ in range(5 * NUM_SLOTS)]
    for at in range(0, len(messages), 7):
        for message in messages[at : at + 7]:
            writer.write(message, 1.0)
        for reader in readers:
            assert [reader.read(1.0) for _ in messages[at : at + 7]] == messages[at : at + 7]


@pytest.mark.parametrize("size", [0, 1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES])
def test_sizes_about_a_slot(size) -> None:
    _, writer, (reader,) = ring(2)
    message = random.Random(size).randbytes(size)
    for _ in range(3):
        writer.write(message, 1.0)
        assert reader.read(1.0) == message


def test_a_message_larger_than_the_ring() -> None:
    _, writer, (reader,) = ring(2)
    message = random.Random(3).randbytes(2 * NUM_SLOTS * SLOT_BYTES + 5)
    thread = threading.Thread(target=writer.write, args=(message, 10.0))
    thread.start()
    assert reader.read(10.0) == message
    thread.join()


def test_nothing_comes() -> None:
    _, writer, (reader,) = ring(2)
    assert reader.read(0.0) is None
    assert reader.read(0.02) is None
    writer.write(b"late", 1.0)
    assert reader.read(0.0) == b"late"


def test_a_rank_that_does_not_read_is_named() -> None:
    _, writer, readers = ring(3)
    for _ in range(NUM_SLOTS):
        writer.write(b"x", 0.1)
        readers[0].read(1.0)
    with pytest.raises(TimeoutError, match="rank 2 has read nothing for 0.05 s"):
        writer.write(b"x", 0.05)


def test_a_sleeping_reader_wakes() -> None:
    _, writer, (reader,) = ring(2)
    found = []
    thread = threading.Thread(target=lambda: found.append(reader.read(30.0)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    writer.write(b"wake", 1.0)
    thread.join(5.0)
    assert found == [b"wake"]


def test_half_a_message_is_not_taken(monkeypatch) -> None:
    """Another core may see that there is a slot before it sees all that is in it."""
    memory, writer, (reader,) = ring(2)
    writer.write(b"whole message", 1.0)
    start = bytes(memory).index(b"whole")
    memory[start : start + 5] = b"torn!"
    monkeypatch.setattr("hybridserve.parallel.step_channel.ring._TORN_S", 0.02)
    with pytest.raises(RuntimeError, match="message 1 of the step channel does not arrive whole"):
        reader.read(1.0)


def test_release_lets_the_memory_go() -> None:
    memory, writer, (reader,) = ring(2)
    writer.release()
    reader.release()
    memory.release()
