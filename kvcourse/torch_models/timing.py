"""Seconds a device takes for a call, by the device's own clock where it has one."""

import statistics

import torch

from kvcourse import measure
from kvcourse.torch_models.devices import parsed_device


def event_seconds(fn, repeats=7, warmup=2, device=None, before=None):
    """Time fn() as the device sees it; a measure.Timing (`.min`, `.median`, `.samples`, in seconds).

    On a CUDA device two events stand around each call in the device's queue, and the device notes
    the time when it reaches them; the host waits once, after the last. On a CPU the call
    returns when the work is done, and the clock is right: measure.time_call.

    device  where fn works: "cuda" or "cpu" (default: "cuda" where this process has used one)
    before  on a CUDA device, a call queued before each timed one and not timed, such as what empties a cache
    Raises ValueError for fewer than 1 repeat, a negative warm-up or an unknown device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    device = parsed_device(device)
    if device.type != "cuda":
        return measure.time_call(fn, repeats, warmup)
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}: give at least 1 repeat and 0 warm-ups")
    with torch.cuda.device(device):
        for _ in range(warmup):
            fn()
        torch.cuda.synchronize()
        pairs = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if before is not None:
                before()
            start.record()
            fn()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
    samples = tuple(start.elapsed_time(end) / 1e3 for start, end in pairs)  # from milliseconds
    spread = statistics.median(samples) / min(samples)
    why = f"the median call took {spread:.1f}x the fastest" if spread > measure.SPREAD_LIMIT else ""
    return measure.Timing(samples, why)
