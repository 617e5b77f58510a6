"""Primer C, programs on a GPU: two clocks that run side by side, levels of memory, and what bounds a product.

Nothing here measures: times come in, pictures and sentences go out. What is said of GPUs is published:
the device table of `kv.sizing.devices()`, the sizes of an H100's levels and the rate of its bus below, and
one figure for a launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import plotly.graph_objects as go

from kvcourse import config, sizing
from kvcourse.figures import template as look

KIB, MIB = 2**10, 2**20

# NVIDIA, "Hopper Tuning Guide": 65,536 registers of 32 bits and 256 KB of L1 and shared memory for each
# multiprocessor, 50 MB of L2. An H100 SXM has 132 multiprocessors.
H100_MULTIPROCESSORS = 132
H100_REGISTERS = 65_536 * 4  # bytes, of each multiprocessor
H100_SHARED = 256 * KIB
H100_L2 = 50 * 10**6
# PCI Express 5.0 with 16 lanes, one direction: 32 GT/s, 128 of 130 bits are data.
PCIE5_BANDWIDTH = 16 * 32e9 / 8 * 128 / 130

# One launch, in seconds. Published figures for a kernel without a graph are 4 to 6 µs on an RTX 5070 Ti
# (susun-blog.com, "pegainfer (3)"); PyTorch adds its own time per operation.
LAUNCH_SECONDS = 5e-6

MOST_ROWS = 1024
ROWS = [2**k for k in range(11)]  # 1 … 1,024


# --- two clocks ------------------------------------------------------------------------


def timeline(work, launch):
    """When each piece runs: a list of (launched, start, end), all in the unit of `work` and `launch`.

    The host needs `launch` for every piece and never waits. The device does one piece at a time, in
    order, and can start none before it is launched.
    """
    host = device = 0
    pieces = []
    for length in work:
        host += launch
        start = max(host, device)
        device = start + length
        pieces.append((host, start, device))
    return pieces


def timeline_figure(launch, lengths, count):
    """Two lanes, host and device, for `count` pieces of each of two lengths (µs)."""
    figure = look.new_figure("time (µs)", "", height=300)
    lanes = []
    for length in lengths:
        pieces = timeline([length] * count, launch)
        host, device = f"host, pieces of {length} µs", f"device, pieces of {length} µs"
        lanes += [host, device]
        ends = [0] + [end for _, _, end in pieces]
        waits = [(end, start) for end, (_, start, _) in zip(ends, pieces, strict=False) if start > end]
        for lane, name, spans in (
            (host, "a launch", [(done - launch, done) for done, _, _ in pieces]),
            (device, "work on the device", [(start, end) for _, start, end in pieces]),
            (device, "the device waits", waits),
        ):
            figure.add_trace(_bars(lane, name, spans).update(showlegend=length == lengths[0]))
    figure.update_layout(barmode="overlay", bargap=0.25)
    return figure.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], showgrid=False)


_WAITS = {"shape": look.CROSS_HATCH, "fgcolor": look.WRONG, "bgcolor": "rgba(0,0,0,0)", "size": 6}
_BARS = {  # what: (fill, outline, color of the number in it, pattern)
    "a launch": (look.PAPER, look.INK, look.INK, {}),
    "work on the device": (look.INK, look.PAPER, look.PAPER, {}),
    "the device waits": (look.WRONG, look.INK, None, _WAITS),
}


def _bars(lane, name, spans):
    fill, outline, text_color, pattern = _BARS[name]
    # A number that does not fit into its bar is left out.
    numbers = [str(n + 1) if text_color and end - start >= 4 else "" for n, (start, end) in enumerate(spans)]
    return go.Bar(
        y=[lane] * len(spans),
        x=[end - start for start, end in spans],
        base=[start for start, _ in spans],
        orientation="h",
        name=name,
        legendgroup=name,
        marker={"color": fill, "pattern": pattern, "line": {"color": outline, "width": 1}},
        text=numbers,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": text_color or look.INK, "size": look.TEXT_SIZE},
        customdata=[[start, end] for start, end in spans],
        hovertemplate=f"{name}: %{{customdata[0]}} to %{{customdata[1]}} µs<extra></extra>",
    )


def timeline_text(launch, lengths, count):
    """When the last piece is done, and what share of that time the device worked."""
    said = []
    for length in lengths:
        end = timeline([length] * count, launch)[-1][2]
        said.append(
            f"{count} pieces of {length} µs are done after {end:,} µs, of which the device works "
            f"{count * length / end:.0%}"
        )
    return f"A launch takes the host {launch} µs. " + "; ".join(said) + "."


# --- levels of memory --------------------------------------------------------------------


def size(count):
    """Bytes of a probe in the unit that fits: 16 KiB, 4 MiB."""
    return f"{count // MIB:,} MiB" if count >= MIB else f"{count // KIB:,} KiB"


def levels_figure(sizes, speeds):
    """Measured GB/s over the size (bytes) of the array that is read again and again."""
    figure = look.new_figure("size of the array", "read (GB/s)", log_x=True)
    line = look.here(sizes, [round(speed, 1) for speed in speeds], name="here", unit="GB/s")
    line.hovertemplate = "%{text}: %{y} GB/s<extra></extra>"
    line.text = [size(count) for count in sizes]
    figure.add_trace(line)
    figure.update_xaxes(tickvals=sizes, ticktext=[size(count) for count in sizes])
    return figure.update_yaxes(rangemode="tozero")


def levels_text(sizes, speeds, why=""):
    """The fastest size against the largest one, and what disturbed the run, if anything did."""
    best = max(range(len(sizes)), key=speeds.__getitem__)
    return (
        f"Fastest at {size(sizes[best])} ({speeds[best]:.0f} GB/s); at {size(sizes[-1])} "
        f"{speeds[-1]:.0f} GB/s, {speeds[best] / speeds[-1]:.1f} times slower."
        + f" Disturbed, do not quote: {why}."
        * bool(why)
    )


def h100_levels():
    """Rows (level, from where it can be reached, size as text, bytes/s or None), from the units outward."""
    h100 = sizing.devices()["h100-sxm"]
    each = f"{H100_MULTIPROCESSORS} × "
    return [
        ("registers", "one thread, its own", f"{each}{H100_REGISTERS / 1e3:.0f} kB", None),
        ("L1 and shared memory", "a group of threads", f"{each}{H100_SHARED / 1e3:.0f} kB", None),
        ("L2 cache", "the whole GPU", f"{H100_L2 / 1e6:.0f} MB", None),
        ("device memory", "the whole GPU", f"{h100.memory_bytes / 1e9:.1f} GB", h100.bandwidth),
        ("host memory", "over the bus, PCIe 5", "", PCIE5_BANDWIDTH),
    ]


# --- bytes and arithmetic ------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """FLOPs and bytes of one product of `rows` rows with a matrix (n_in, n_out)."""

    flops: int
    bytes: int

    @property
    def intensity(self):
        """FLOP per byte."""
        return self.flops / self.bytes


def product(rows, n_in, n_out, bytes_per_number):
    """x (rows, n_in) @ W (n_in, n_out): a multiply-add is 2 FLOPs; x and W are read, y is written, once."""
    numbers = rows * n_in + n_in * n_out + rows * n_out
    return Product(2 * rows * n_in * n_out, numbers * bytes_per_number)


def rows_to_ridge(device, n_in, n_out):
    """The fewest rows for which the product reaches the device's ridge point, or None where it never does.

    16-bit numbers where the device has a 16-bit peak, float32 otherwise. Raises ValueError without a peak.
    """
    if device.ridge is None:
        raise ValueError(f"no peak is published for {device.name}: its ridge point is not known")
    number = bytes_per_number(device)
    # 2 r n m = ridge · b · (r n + n m + r m), solved for r.
    left = 2 * n_in * n_out - device.ridge * number * (n_in + n_out)
    return math.ceil(device.ridge * number * n_in * n_out / left) if left > 0 else None


def bytes_per_number(device):
    """2 for devices that multiply 16-bit numbers (or do not say), 4 for those that only do float32."""
    return 4 if device.flops_32bit and not device.flops_16bit else 2


def this_computer(bandwidth, flops, disturbed=False):
    """A `Device` from measured bytes/s and float32 FLOP/s, rounded to three digits: more would be noise.

    disturbed  whether either was measured in a disturbed run; the name then says so
    """
    return sizing.Device(
        key="here",
        name="this computer, measured above" + ", disturbed" * disturbed,
        memory_bytes=None,
        bandwidth=float(f"{bandwidth:.2e}"),
        flops_16bit=None,
        flops_fp8=None,
        flops_32bit=float(f"{flops:.2e}"),
        source="measured on this page",
    )


def most_intensity(n_in, n_out, bytes_per_number):
    """What the intensity of a product comes close to with ever more rows: x and y then outweigh W."""
    return 2 * n_in * n_out / (bytes_per_number * (n_in + n_out))


def ridge_table():
    """The published devices as text: peak, bandwidth, ridge point, and the rows that reach it by matrix."""
    shapes = matrices()
    names = "".join(f"{name.partition(':')[0]:>13}" for name in shapes)
    over = f"{'rows needed for':>98}"
    lines = [over, f"{'':<36}{'TFLOP/s':>9}{'GB/s':>7}{'ridge':>7}{names}"]
    for device in sizing.devices().values():
        if device.ridge is None:
            continue
        rows = [rows_to_ridge(device, *shape) for shape in shapes.values()]
        name = device.name.replace("NVIDIA ", "").replace("GeForce ", "").partition(",")[0]
        rates = f"{device.peak() / 1e12:>9,.1f}{device.bandwidth / 1e9:>7,.0f}{device.ridge:>7.0f}"
        needed = "".join(f"{'never' if n is None else f'{n:,}':>13}" for n in rows)
        lines.append(f"{f'{name}, {8 * bytes_per_number(device)} bits':<36}{rates}{needed}")
    most = "".join(f"{most_intensity(*shape, 2):>13,.0f}" for shape in shapes.values())
    return "\n".join([*lines, f"{'FLOP per byte with ever more rows (16 bits): below':<59}{most}"])


def rows_table(found, n_in, n_out):
    """Measured products as text: one line for each number of rows, all ratios from this one run.

    found  rows → Timing of one float32 product
    """
    one = found[min(found)].min
    lines = [f"{'rows':>5}{'time, 1 row = 1':>18}{'GFLOP/s':>10}{'FLOP per byte':>16}"]
    for rows, timing in found.items():
        done = product(rows, n_in, n_out, 4)
        line = f"{rows:>5}{timing.min / one:>18.1f}{done.flops / timing.min / 1e9:>10.0f}"
        lines.append(f"{line}{done.intensity:>16.1f}" + "   disturbed" * timing.disturbed)
    return "\n".join(lines)


def rows_figure(found):
    """Measured time over the rows, relative to one row, between two lines: for free, and as the rows."""
    rows = list(found)
    figure = look.new_figure("rows", "time, one row = 1", log_x=True, log_y=True)
    one = found[rows[0]].min
    for name, y, dash in (
        ("twice the rows, twice the time", rows, "dashdot"),
        ("more rows for free", 1, "dot"),
    ):
        figure.add_trace(
            go.Scatter(
                x=rows,
                y=y if isinstance(y, list) else [y] * len(rows),
                name=name,
                mode="lines",
                line={"color": look.INK, "width": 1.5, "dash": dash},
                hoverinfo="skip",
            )
        )
    figure.add_trace(look.here(rows, [round(found[n].min / one, 2) for n in rows], name="measured here"))
    figure.update_yaxes(dtick=1)
    return figure.update_xaxes(tickvals=rows, ticktext=[f"{n:,}" for n in rows])


def rows_text(found):
    """The most rows that cost less than twice two rows, and what the last doubling cost."""
    rows = list(found)
    times = [found[n].min for n in rows]
    cheap = max(n for n, seconds in zip(rows[1:], times[1:], strict=True) if seconds < 2 * times[1])
    return (
        f"Up to {cheap} rows a product takes less than twice as long as with {rows[1]}; from {rows[-2]} to "
        f"{rows[-1]} rows it takes {times[-1] / times[-2]:.1f} times as long."
        + " Disturbed, do not quote."
        * any(timing.disturbed for timing in found.values())
    )


# --- the main panel --------------------------------------------------------------------------


def matrices():
    """The first matrix of the MLP, (n_in, n_out), by label, of three models."""
    shapes = {"GPT-2 124M": config.lookup("gpt2"), "Llama 3.1 8B": config.lookup("llama-3.1-8b")}
    found = {"austen-gpt2: 256 × 1,024": (256, 1024)}
    for name, c in shapes.items():
        found[f"{name}: {c.hidden_size:,} × {c.intermediate_size:,}"] = (c.hidden_size, c.intermediate_size)
    return found


def bound(rows, matrix, device, launch):
    """What one of many products costs, and which of three limits decides.

    matrix  (n_in, n_out);  device  a `kv.sizing.Device`;  launch  seconds of one launch.
    `parts` are seconds of "launch", "memory" and "arithmetic" (None where no peak is published), each
    with the values at all of ROWS in `lines`.
    """
    number = bytes_per_number(device)

    def parts(n):
        done = product(n, *matrix, number)
        arithmetic = None if device.ridge is None else done.flops / device.peak()
        return {"launch": launch, "memory": done.bytes / device.bandwidth, "arithmetic": arithmetic}

    now = parts(rows)
    lines = {name: [parts(n)[name] for n in ROWS] for name in now}
    known = {name: seconds for name, seconds in now.items() if seconds is not None}
    return {
        "rows": rows,
        "matrix": matrix,
        "device": device,
        "bits": 8 * number,
        "product": product(rows, *matrix, number),
        "parts": now,
        "lines": lines,
        "bound": max(known, key=known.get),
        "total": max(known.values()),
    }


_LINES = {  # part: label, color, dash
    "launch": ("one launch", look.INK, "dot"),
    "memory": ("moving the bytes", "#56B4E9", "solid"),
    "arithmetic": ("the arithmetic", "#CC79A7", "dash"),
}


def bound_figure(data):
    """The three limits over the rows, and the largest of them at the chosen number of rows."""
    figure = look.new_figure("rows", "time", log_x=True, log_y=True)
    highest = [
        max(line[k] for line in data["lines"].values() if line[k] is not None) for k in range(len(ROWS))
    ]
    figure.add_trace(
        go.Scatter(
            x=ROWS,
            y=_us(highest),
            name="the largest decides",
            mode="lines",
            line={"color": look.INK, "width": 9},
            opacity=0.2,
            hoverinfo="skip",
        )
    )
    for part, (name, color, dash) in _LINES.items():
        if data["parts"][part] is None:
            continue
        figure.add_trace(
            go.Scatter(
                x=ROWS,
                y=_us(data["lines"][part]),
                name=name,
                mode="lines",
                line={"color": color, "width": 2.5, "dash": dash},
                hovertemplate=f"{name}: %{{y}} µs for %{{x:,}} rows<extra></extra>",
            )
        )
    figure.add_trace(
        go.Scatter(
            x=[data["rows"]],
            y=_us([data["total"]]),
            name="chosen",
            mode="markers",
            marker={"color": look.INK, "size": 12, "symbol": "circle"},
            hovertemplate=f"%{{x:,}} rows: {_hedged('%{y} µs', data)}<extra></extra>",
        )
    )
    figure.update_xaxes(tickvals=ROWS, ticktext=[f"{n:,}" for n in ROWS], range=[-0.1, 3.11])
    # The same for every GPU, 0.1 µs to 10 ms; a computer without one may need 10 s for the largest product.
    top = 4 if max(highest) < 1e-2 else 7
    labels = ["0.1 µs", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s", "10 s"]
    ticks = [10.0**k for k in range(-1, 8)]
    return figure.update_yaxes(range=[-1, top], tickvals=ticks, ticktext=labels)


def _hedged(text, data):
    """A bound for a published device; an estimate for this computer, whose bytes may come from a cache."""
    return f"about {text}" if data["device"].key == "here" else f"{text} at least"


def _us(seconds):
    return [float(f"{value * 1e6:.4g}") for value in seconds]


def bound_text(data):
    """Bytes, FLOPs, intensity against the ridge point, the three times, and the one that decides."""
    done, device, parts = data["product"], data["device"], data["parts"]
    rows = f"{data['rows']:,} row{'s' * (data['rows'] > 1)}"
    ridge = "ridge point not published"
    if device.ridge is not None:
        ridge = f"ridge point {device.ridge:.{0 if device.ridge >= 10 else 1}f}"
    unknown = "arithmetic unknown"
    arithmetic = unknown if parts["arithmetic"] is None else f"arithmetic {_short(parts['arithmetic'])}"
    return (
        f"{device.name}, {rows} × ({data['matrix'][0]:,} × {data['matrix'][1]:,}), {data['bits']} bits: "
        f"{done.bytes / 1e6:.1f} MB, {done.flops / 1e9:.3g} GFLOP, {done.intensity:.2f} FLOP per byte "
        f"({ridge}). Launch {_short(parts['launch'])}, memory {_short(parts['memory'])}, {arithmetic}: "
        f"{data['bound']} decides{', as far as is known' * (parts['arithmetic'] is None)}, "
        f"{_hedged(_short(data['total']), data)}"
        + f", {_short(data['total'] / data['rows'])} a row" * (data["rows"] > 1)
        + "."
    )


def _short(seconds):
    """Three digits in the unit that fits: 0.530 ns, 35.1 µs, 8.10 ms."""
    unit, length = next(((u, t) for u, t in (("ms", 1e-3), ("µs", 1e-6)) if seconds >= t), ("ns", 1e-9))
    value = seconds / length
    decimals = max(0, 2 - math.floor(math.log10(value))) if value >= 1 else 3
    return f"{value:,.{decimals}f} {unit}"
