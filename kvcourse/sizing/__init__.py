"""Pure arithmetic on shapes: positions, bytes, FLOPs, time at least. No arrays, no clock.

counts    positions a loop computes, rows a growing cache copies
units     "80 GB" and 80 · 1000³
memory    bytes of caches and weights; tokens and requests that fit
passes    FLOPs and bytes of a pass
hardware  published devices, the roofline, seconds of a pass at least
prices    what a hosted API charges for requests whose beginnings it keeps
"""

from kvcourse.sizing.counts import STRATEGIES, positions_processed, rows_copied, rows_reserved
from kvcourse.sizing.hardware import (
    Device,
    PassTime,
    device,
    devices,
    pass_time,
    roofline,
    step_time,
    time_to_first_token,
)
from kvcourse.sizing.memory import (
    NUMBER_FORMATS,
    bytes_of,
    free_after_weights,
    kv_bytes,
    kv_bytes_per_token,
    kv_bytes_reserved,
    requests_that_fit,
    shared_and_own_bytes,
    tokens_that_fit,
    weight_bytes,
)
from kvcourse.sizing.passes import Flops, Traffic, Work, forward_flops, pass_bytes, work
from kvcourse.sizing.plan import Plan
from kvcourse.sizing.units import UNITS, format_bytes, parse_bytes

__all__ = [
    "NUMBER_FORMATS", "STRATEGIES", "UNITS", "Device", "Flops", "PassTime", "Plan", "Traffic", "Work",
    "bytes_of", "device", "devices", "format_bytes", "forward_flops", "free_after_weights", "kv_bytes",
    "kv_bytes_per_token", "kv_bytes_reserved", "parse_bytes", "pass_bytes", "pass_time",
    "positions_processed", "requests_that_fit", "roofline", "rows_copied", "rows_reserved",
    "shared_and_own_bytes", "step_time", "time_to_first_token", "tokens_that_fit", "weight_bytes", "work",
]  # fmt: skip
