"""Filling parameters from files and from random draws: whatever the pieces, the threads and the shards."""

import json
import os
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hybridserve.parallel.weights import dummy, staging
from hybridserve.parallel.weights.checkpoint import Checkpoint
from hybridserve.parallel.weights.dummy import DISTRIBUTIONS, DummyTensor
from hybridserve.parallel.weights.loader import checkpoint_targets, load_checkpoint
from hybridserve.parallel.weights.parameter import ShardedParameter, whole
from hybridserve.parallel.weights.workers import run_on_threads

CPU = torch.device("cpu")
SHAPES = {"vector": (37,), "matrix": (19, 6), "wide": (3, 50), "stacked": (4, 7, 5), "deep": (2, 3, 4, 5)}


def random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


class Holder(nn.Module):
    """One parameter for each of SHAPES."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            data = torch.full(shape, float("nan"))
            setattr(self, name, ShardedParameter(data, {"": whole(shape[0])}))


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of SHAPES, a tensor a file."""
    for name, shape in SHAPES.items():
        save_file({name: random(shape)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in SHAPES}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize("num_bytes", [16, 60, 128, 8 * 2**20])
def test_every_slice_in_every_piece(folder, monkeypatch, num_bytes) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", num_bytes)
    with Checkpoint(folder) as checkpoint:
        for name, shape in SHAPES.items():
            source = checkpoint.tensor(name)
            for dim, size in enumerate(shape):
                for start, end in ((0, size), (1, size - 1), (size - 1, size), (1, 1)):
                    expected = random(shape).narrow(dim, start, end - start)
                    target = torch.full_like(expected, float("nan"))
                    source.copy_to(target, dim, start, end)
                    assert torch.equal(target, expected), (name, dim, start, end)


def test_another_dtype_and_memory_order(folder) -> None:
    by_columns = torch.zeros(6, 19, dtype=torch.bfloat16).t()
    with Checkpoint(folder) as checkpoint:
        checkpoint.tensor("matrix").copy_to(by_columns, 0, 0, 19)
    assert torch.equal(by_columns, random((19, 6)).bfloat16())


@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_fill_everything(folder, monkeypatch, num_threads) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 24)
    holder = Holder()
    seen: list[tuple[int, int]] = []
    load_checkpoint(
        folder,
        checkpoint_targets(holder, lambda name: name),
        lambda _: None,
        lambda *at: seen.append(at),
        num_threads,
    )
    for name, shape in SHAPES.items():
        assert torch.equal(getattr(holder, name), random(shape))
    assert len(seen) == len(SHAPES) and seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_a_wrong_shape_is_found_before_anything_is_read(folder) -> None:
    save_file({"deep": torch.zeros(2, 3, 4, 6)}, folder / "deep.safetensors")
    holder = Holder()
    with pytest.raises(ValueError, match=r"deep in deep.safetensors has shape \[2, 3, 4, 6\]"):
        load_checkpoint(folder, checkpoint_targets(holder, lambda name: name), lambda _: None)
    assert holder.vector.isnan().all()


def test_a_file_that_shrinks(folder) -> None:
    with Checkpoint(folder) as checkpoint:
        path = folder / "matrix.safetensors"
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(
            ValueError, match="tensor matrix in matrix.safetensors cannot be read: the file e"
        ):
            checkpoint.tensor("matrix").copy_to(torch.empty(19, 6), 0, 0, 19)


def test_a_file_cut_short(folder) -> None:
    path = folder / "matrix.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    with (
        pytest.raises(ValueError, match="matrix.safetensors is not a readable safetensors file"),
        Checkpoint(folder),
    ):
        pass


def test_what_a_thread_raises_is_raised_and_ends_the_work() -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("item 1 is bad")
        # the other thread is not done with its items before the first one's error can be seen
        time.sleep(0.02)

    with pytest.raises(ValueError, match="item 1 is bad"):
        list(run_on_threads(work, range(500), 2, CPU))
    assert len(begun) < 500
    assert sorted(run_on_threads(lambda item: None, range(9), 3, CPU)) == list(range(9))


@pytest.mark.parametrize("init", DISTRIBUTIONS)
def test_dummy_slices_are_slices_of_one_tensor(monkeypatch, init) -> None:
    """A shard of any cut, in any dtype and memory order, sees the same values; blocks differ."""
    monkeypatch.setattr(dummy, "BLOCK_ELEMENTS", 40)
    source = DummyTensor("some.name", (23, 6), init, 5)
    full = torch.full((23, 6), float("nan"))
    source.copy_to(full, 0, 0, 23)
    assert full.isfinite().all() and len(full.unique()) > 130
    for dim, start, end in ((0, 5, 14), (0, 22, 23), (1, 2, 5), (0, 3, 3)):
        part = torch.full_like(full.narrow(dim, start, end - start), float("nan"))
        source.copy_to(part, dim, start, end)
        assert torch.equal(part, full.narrow(dim, start, end - start))
    by_columns = torch.empty(6, 23, dtype=torch.bfloat16).t()
    source.copy_to(by_columns, 0, 0, 23)
    assert torch.equal(by_columns, full.bfloat16())
    for other in (DummyTensor("some.name", (23, 6), init, 6), DummyTensor("a.name", (23, 6), init, 5)):
        values = torch.empty(23, 6)
        other.copy_to(values, 0, 0, 23)
        assert not torch.isclose(values, full, rtol=1e-6).any(1).all()


def test_dummy_weights_keep_the_scale() -> None:
    values = torch.empty(512, 256)
    DummyTensor("w", (512, 256), "weight", 0).copy_to(values, 0, 0, 512)
    assert abs(values.std() * 16 - 1) < 0.02
    stacked = torch.empty(4, 64, 256)
    DummyTensor("w", (4, 64, 256), "stacked_weight", 0).copy_to(stacked, 0, 0, 4)
    assert abs(stacked.std() * 16 - 1) < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gets_what_a_cpu_gets(folder, monkeypatch) -> None:
    """Files: the same bits. Draws: the same for every cut, and within one block's memory."""
    monkeypatch.setattr(staging, "STAGING_BYTES", 60)
    holder = Holder()
    for name, shape in SHAPES.items():
        data = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
        setattr(holder, name, ShardedParameter(data, {"": whole(shape[0])}))
    load_checkpoint(folder, checkpoint_targets(holder, lambda name: name), lambda _: None, num_threads=4)
    for name, shape in SHAPES.items():
        assert torch.equal(getattr(holder, name).cpu(), random(shape).bfloat16())
    source = DummyTensor("w", (8192, 4096), "weight", 1)
    full = torch.empty(8192, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    source.copy_to(full, 0, 0, 8192)
    assert torch.cuda.max_memory_allocated() - before <= 4 * dummy.BLOCK_ELEMENTS
    part = torch.empty(8192, 1000, dtype=torch.bfloat16, device="cuda")
    source.copy_to(part, 1, 500, 1500)
    assert torch.equal(part, full[:, 500:1500])
