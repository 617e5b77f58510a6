"""Published devices, the roofline, and how long a pass takes at least.

Every time here is a floor: bytes over the published bandwidth, FLOPs over the published peak. Real
steps take longer, by a factor that chapters 09 to 11 measure.
"""

import json
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from kvcourse import paths
from kvcourse.sizing.memory import check_format
from kvcourse.sizing.passes import work
from kvcourse.sizing.units import at_least


@dataclass(frozen=True)
class Device:
    """A processor with its memory, as its maker publishes it.

    memory_bytes  what the driver shows (nvidia-smi), or None where the device comes in several sizes
    bandwidth     bytes a second between memory and processor
    flops_16bit, flops_fp8, flops_32bit  peak FLOP/s of dense matrix products (16-bit: with 32-bit
                  sums), or None where none is published
    multiprocessors  of the GPU, each with its own programs (a GPU's "SM"), or None where `source` and
                  `multiprocessors_source` do not name them
    """

    key: str
    name: str
    memory_bytes: int | None
    bandwidth: float
    flops_16bit: float | None
    flops_fp8: float | None
    flops_32bit: float | None
    source: str
    multiprocessors: int | None = None
    multiprocessors_source: str | None = None

    def peak(self, weights_dtype="float16"):
        """FLOP/s at which products with these weights run, or None where it is not published.

        Weights in q8_0 and q4_0 are expanded to 16 bits before they are multiplied; fp8 weights too
        where the device has no fp8 arithmetic, and 16-bit ones to 32 where it has no 16-bit peak.
        """
        check_format(weights_dtype)
        if weights_dtype == "float32":
            return self.flops_32bit
        if weights_dtype == "fp8" and self.flops_fp8:
            return self.flops_fp8
        return self.flops_16bit or self.flops_32bit

    @property
    def ridge(self):
        """FLOP per byte at which 16-bit arithmetic takes as long as reading: below, memory decides."""
        peak = self.peak()
        return None if peak is None else peak / self.bandwidth


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass, split by what takes them. `compute` is None where no peak is known.

    Reading, arithmetic and launching overlap, so the longest of the three decides.
    """

    weights: float
    caches: float
    compute: float | None
    launches: float

    @property
    def memory(self):
        """Seconds of moving weights and caches."""
        return self.weights + self.caches

    @property
    def total(self):
        """The longest of memory, compute and launches."""
        return max(self.memory, self.compute or 0.0, self.launches)

    @property
    def bound(self):
        """What decides: "memory", "compute" or "launches"."""
        parts = {"memory": self.memory, "compute": self.compute or 0.0, "launches": self.launches}
        return max(parts, key=parts.get)


@cache
def devices():
    """Published devices by key, from `data/devices.json`: {"h100-sxm": Device, …}."""
    with open(paths.data_dir() / "devices.json", encoding="utf-8") as file:
        entries = json.load(file)["devices"]
    return MappingProxyType({key: _device(key, entry) for key, entry in entries.items()})


def device(key):
    """One of `devices()`. Raises KeyError that lists the keys there are."""
    if key not in devices():
        raise KeyError(f"no device {key!r} in the table: use one of {', '.join(devices())}")
    return devices()[key]


def _check_device(found):
    if not isinstance(found, Device):
        raise TypeError(f"device is {found!r}: give a Device, such as kv.sizing.device('l4')")


def _device(key, entry):
    def per_second(field, unit):
        return None if entry.get(field) is None else entry[field] * unit

    return Device(
        key=key,
        name=entry["name"],
        memory_bytes=entry["memory_bytes"],
        bandwidth=per_second("bandwidth_gb_s", 1e9),
        flops_16bit=per_second("tflops_16bit", 1e12),
        flops_fp8=per_second("tflops_fp8", 1e12),
        flops_32bit=per_second("tflops_32bit", 1e12),
        source=entry["source"],
        multiprocessors=entry.get("multiprocessors"),
        multiprocessors_source=entry.get("multiprocessors_source"),
    )


def roofline(device, intensity, weights_dtype="float16"):
    """FLOP/s a device can reach at so many FLOP per byte: bandwidth · intensity, at most the peak.

    Source: Williams, Waterman, Patterson, "Roofline", Communications of the ACM 52(4), 2009.
    Raises ValueError for an intensity that is not above 0, or a device without a published peak.
    """
    _check_device(device)
    if not intensity > 0:
        raise ValueError(f"intensity is {intensity!r}: give FLOP per byte, above 0")
    peak = device.peak(weights_dtype)
    if peak is None:
        raise ValueError(f"no peak in {weights_dtype} is published for {device.name}: its roof is not known")
    return min(peak, device.bandwidth * intensity)


def pass_time(done, device, launch_seconds=0.0):
    """`PassTime` of `done`, a pass's `Work`; `launch_seconds` is what all its launches take together."""
    _check_device(device)
    if not launch_seconds >= 0:
        raise ValueError(f"launch_seconds is {launch_seconds!r}: give the seconds of all launches, 0 or more")
    traffic, peak = done.traffic, device.peak(done.weights_dtype)
    return PassTime(
        weights=traffic.weights / device.bandwidth,
        caches=(traffic.cache_read + traffic.cache_written) / device.bandwidth,
        compute=None if peak is None else done.flops.total / peak,
        launches=float(launch_seconds),
    )


def step_time(
    config, device, context, batch=1, dtype="float16", weights_dtype="float16", launch_seconds=0.0
):  # fmt: skip
    """`PassTime` of one decode step: `batch` sequences with `context` cached tokens each."""
    done = work(config, 1, context, batch, dtype, weights_dtype)
    return pass_time(done, device, launch_seconds)


def time_to_first_token(config, device, prompt, cached=0, dtype="float16", weights_dtype="float16"):
    """`PassTime` of reading a prompt of which the first `cached` tokens are in the cache already.

    Raises ValueError unless cached is below prompt: at least one token must be computed.
    """
    (prompt,), (cached,) = at_least(1, prompt=prompt), at_least(0, cached=cached)
    if cached >= prompt:
        raise ValueError(
            f"cached {cached:,} is not below prompt {prompt:,}: the last token is always computed"
        )
    return pass_time(work(config, prompt - cached, cached, 1, dtype, weights_dtype), device)
