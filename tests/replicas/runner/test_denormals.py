"""Denormals are flushed for the step and for nobody else."""

import pytest
import torch

from hybridserve.replicas.runner.denormals import flushed_denormals

SUBNORMAL = 1e-40


def product() -> float:
    return (torch.full((4,), SUBNORMAL) * 0.5).max().item()


def test_denormals_are_flushed_inside_and_kept_outside():
    assert product() > 0
    with flushed_denormals():
        assert product() == 0
    assert product() > 0


def test_a_thread_that_flushed_before_still_does():
    torch.set_flush_denormal(True)
    try:
        with flushed_denormals():
            assert product() == 0
        assert product() == 0
    finally:
        torch.set_flush_denormal(False)


def test_an_error_leaves_the_thread_as_it_was():
    with pytest.raises(RuntimeError, match="broken"), flushed_denormals():
        raise RuntimeError("broken")
    assert product() > 0
