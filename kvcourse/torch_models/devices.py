"""Names of devices, as every part of this package takes them."""

import torch

KINDS = ("cpu", "cuda", "meta")


def parsed_device(name):
    """A name such as "cpu" or "cuda:1", or a torch.device, as a torch.device; not asked: is it there?

    ValueError for everything but a CPU, a CUDA device and "meta". There is one CPU and one "meta", so
    their number is left out, as tensors leave it out.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in KINDS:
        raise ValueError(f"device {str(name)!r:.60} is not supported: use 'cpu', 'cuda' or 'meta'")
    return device if device.type == "cuda" else torch.device(device.type)
