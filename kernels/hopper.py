"""What a GPU of compute capability 9.0 or more can do, and older ones cannot."""

import functools

import torch


def has_dependent_launches(device: torch.device) -> bool:
    """Whether a launch may begin while the one before it runs (not interpreted)."""
    return device.type == "cuda" and _is_hopper(device)


def has_tensor_descriptors(device: torch.device) -> bool:
    """Whether kernels take tensor descriptors (interpreted ones do)."""
    return device.type == "cpu" or _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
