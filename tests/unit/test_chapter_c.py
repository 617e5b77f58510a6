"""Primer C: its stream, clocks, limits and checks, and that no printed digit hangs on a rounding."""

import math
import random
import threading
import time

import numpy as np
import pytest

import kvcourse as kv
from kvcourse import checks, paths, streams
from kvcourse.bench.chapter_code import tagged_code
from kvcourse.checks import chapter_c as exercise
from kvcourse.figures import chapter_c as figures
from kvcourse.figures import template as look
from kvcourse.measure import Timing
from kvcourse.widgets import chapter_c as widgets

NOTEBOOK = paths.chapters_dir() / "primers" / "c_programs_on_a_gpu.ipynb"
PATIENCE = 30  # seconds before a wait that should end counts as hung

DEVICES = kv.sizing.devices()
LLAMA, GPT2, AUSTEN = (4096, 14336), (768, 3072), (256, 1024)


# --- the page's Stream is the package's ----------------------------------------------------


@pytest.fixture(params=["the page's", "the package's"])
def new_stream(request):
    if request.param == "the package's":
        return streams.Stream
    return tagged_code(NOTEBOOK, "plain-stream")["Stream"]


def test_launch_returns_at_once_and_work_keeps_its_order(new_stream):
    stream, go, done = new_stream(), threading.Event(), []
    stream.launch(go.wait, PATIENCE)
    for number in range(100):
        stream.launch(done.append, number)
    assert done == []
    go.set()
    stream.synchronize()
    assert done == list(range(100))


def test_arguments_count_when_the_device_gets_there(new_stream):
    stream, go, x, y = new_stream(), threading.Event(), np.ones(3), np.zeros(3)
    stream.launch(go.wait, PATIENCE)
    stream.launch(np.copyto, y, x)
    x[:] = 7
    go.set()
    stream.synchronize()
    assert y.tolist() == [7, 7, 7]


def test_events_lie_between_the_work_around_them(new_stream):
    stream = new_stream()
    first = stream.record()
    stream.launch(time.sleep, 0.02)
    second = stream.record()
    third = stream.record()
    third.synchronize()
    assert second.seconds_since(first) >= 0.019  # sleep is at least its argument, a clock tick aside
    assert third.seconds_since(second) >= 0


def fail(stream, done):
    for work in (lambda: done.append("before"), lambda: 1 / 0, lambda: done.append("after")):
        stream.launch(work)
    stream.record().synchronize()  # an event passes all the same


def test_an_error_drops_what_follows_and_nobody_waits_for_ever(new_stream):
    stream, done = new_stream(), []
    fail(stream, done)
    assert done == ["before"]


def test_the_packages_stream_raises_it_at_synchronize_once():
    """The page's keeps it: where it is raised is a prediction that its code must not give away."""
    stream, done = streams.Stream(), []
    fail(stream, done)
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    stream.launch(done.append, "again")
    stream.synchronize()
    assert done == ["before", "again"]
    stream = tagged_code(NOTEBOOK, "plain-stream")["Stream"]()
    fail(stream, [])
    stream.synchronize()
    assert isinstance(stream.error, ZeroDivisionError)


# --- two clocks ----------------------------------------------------------------------------


def test_timeline_by_hand():
    assert figures.timeline([2, 2, 2], 5) == [(5, 5, 7), (10, 10, 12), (15, 15, 17)]
    assert figures.timeline([20, 1, 1], 5) == [(5, 5, 25), (10, 25, 26), (15, 26, 27)]
    assert figures.timeline([], 5) == []


def test_the_pages_timeline_is_the_packages():
    plain, draw = tagged_code(NOTEBOOK, "plain-timeline")["timeline"], random.Random(0)
    for _ in range(50):
        work, launch = [draw.randint(0, 9) for _ in range(draw.randint(0, 12))], draw.randint(0, 9)
        assert plain(work, launch) == figures.timeline(work, launch)


def test_timeline_sentence_and_waits():
    text = figures.timeline_text(5, (2, 20), 8)
    assert "8 pieces of 2 µs are done after 42 µs, of which the device works 38%" in text  # 16 / 42
    assert "8 pieces of 20 µs are done after 165 µs, of which the device works 97%" in text  # 160 / 165
    drawing = figures.timeline_figure(5, (2, 20), 8)
    waits = [trace for trace in drawing.data if trace.name == "the device waits"]
    assert [list(trace.x) for trace in waits] == [[5] + [3] * 7, [5]]
    assert all(trace.marker.pattern.shape == look.CROSS_HATCH for trace in waits)
    assert sum(trace.showlegend for trace in drawing.data) == 3


# --- levels ----------------------------------------------------------------------------------


def test_h100_levels_by_hand():
    levels = {name: (room, rate) for name, _, room, rate in figures.h100_levels()}
    assert levels["registers"] == ("132 × 262 kB", None)  # 65,536 registers of 4 bytes are 262,144 bytes
    assert levels["L1 and shared memory"] == ("132 × 262 kB", None)  # 256 KiB
    assert levels["L2 cache"] == ("50 MB", None)
    assert levels["device memory"] == ("85.5 GB", 3.35e12)  # 81,559 MiB = 85,520,809,984 bytes
    # 32 GT/s on 16 lanes, 8 bits a byte, 128 of 130 bits: 63.0 GB/s.
    assert levels["host memory"][1] == pytest.approx(63.0e9, rel=1e-3)


def test_levels_sentence_names_what_disturbed_the_run():
    sizes, speeds = [2**14, 2**20, 2**28], [30.0, 60.0, 12.0]
    text = figures.levels_text(sizes, speeds)
    assert text == "Fastest at 1 MiB (60 GB/s); at 256 MiB 12 GB/s, 5.0 times slower."
    assert figures.levels_text(sizes, speeds, "other work").endswith("do not quote: other work.")
    (line,) = figures.levels_figure(sizes, speeds).data
    assert list(line.text) == ["16 KiB", "1 MiB", "256 MiB"]


# --- bytes and arithmetic ----------------------------------------------------------------------


def test_product_by_hand():
    done = figures.product(3, 10, 20, 4)
    assert (done.flops, done.bytes) == (2 * 3 * 10 * 20, 4 * (30 + 200 + 60))
    assert done.intensity == 1200 / 1160


@pytest.mark.parametrize("key", [key for key, device in DEVICES.items() if device.ridge])
@pytest.mark.parametrize("shape", [LLAMA, GPT2, AUSTEN])
def test_rows_to_ridge_are_the_fewest(key, shape):
    device = DEVICES[key]
    number, rows = figures.bytes_per_number(device), figures.rows_to_ridge(device, *shape)
    if rows is None:
        assert figures.most_intensity(*shape, number) <= device.ridge
        return
    assert figures.product(rows, *shape, number).intensity >= device.ridge
    assert rows == 1 or figures.product(rows - 1, *shape, number).intensity < device.ridge


def test_most_intensity_is_approached_and_not_reached():
    for shape in (LLAMA, GPT2, AUSTEN):
        most = figures.most_intensity(*shape, 2)
        near = figures.product(10**9, *shape, 2).intensity
        assert 0.999 * most < near < most
    assert figures.most_intensity(256, 1024, 2) == 204.8


def test_a_device_without_a_peak_has_no_ridge():
    with pytest.raises(ValueError, match="no peak is published for Apple M4"):
        figures.rows_to_ridge(DEVICES["apple-m4"], *LLAMA)
    assert "Apple" not in figures.ridge_table()


def test_this_computer_counts_in_float32():
    here = figures.this_computer(29.44e9, 151.7e9)
    assert (here.bandwidth, here.peak(), figures.bytes_per_number(here)) == (29.4e9, 152e9, 4)
    assert here.name == "this computer, measured above"
    assert figures.this_computer(29.44e9, 151.7e9, True).name.endswith("above, disturbed")
    assert figures.bytes_per_number(DEVICES["h100-sxm"]) == figures.bytes_per_number(DEVICES["apple-m4"]) == 2


def timings(seconds):
    return {rows: Timing((each,)) for rows, each in seconds.items()}


def test_rows_table_and_sentence():
    found = timings({1: 1e-3, 2: 2e-3, 4: 3e-3, 8: 6e-3})
    table = figures.rows_table(found, 1000, 500).splitlines()
    assert table[3].split() == ["4", "3.0", "1", "2.0"]  # 4 MFLOP in 3 ms; 4e6 / (4 · 506,000) FLOP per byte
    text = figures.rows_text(found)
    assert text.startswith("Up to 4 rows a product takes less than twice as long as with 2; from 4 to 8")
    found[8] = Timing((6e-3,), "other work")
    assert figures.rows_table(found, 1000, 500).splitlines()[4].endswith("disturbed")
    assert figures.rows_text(found).endswith("Disturbed, do not quote.")
    assert list(figures.rows_figure(found).data[-1].y) == [1, 2, 3, 6]


# --- the panel -----------------------------------------------------------------------------------


def sentence(rows, shape, key):
    return figures.bound_text(figures.bound(rows, shape, DEVICES[key], figures.LAUNCH_SECONDS))


@pytest.mark.parametrize(
    "rows, shape, key, words",
    [
        # 2 · (4,096 · 14,336 + 4,096 + 14,336) B = 117.48 MB, over 3.35 TB/s 35.07 µs
        (1, LLAMA, "h100-sxm", "memory 35.1 µs, arithmetic 119 ns: memory decides, 35.1 µs at least."),
        (512, LLAMA, "h100-sxm", "arithmetic decides, 60.8 µs at least, 119 ns a row."),
        (1, GPT2, "h100-sxm", "memory 1.41 µs, arithmetic 4.77 ns: launch decides, 5.00 µs"),
        (1024, GPT2, "h100-sxm", "arithmetic 4.88 µs: launch decides, 5.00 µs at least, 4.88 ns a row."),
        (1, GPT2, "rtx-3060-laptop", "memory decides, 14.1 µs at least."),
        (1, GPT2, "apple-m4", "(ridge point not published)"),
        (1, GPT2, "apple-m4", "arithmetic unknown: memory decides, as far as is known, 39.4 µs at least."),
    ],
)
def test_sentences_by_hand(rows, shape, key, words):
    assert words in sentence(rows, shape, key)


def test_the_h200_gains_by_bandwidth_with_one_row_and_nothing_with_512():
    def total(rows, key):
        return figures.bound(rows, LLAMA, DEVICES[key], figures.LAUNCH_SECONDS)["total"]

    assert total(1, "h100-sxm") / total(1, "h200") == pytest.approx(4.8 / 3.35)
    assert total(512, "h100-sxm") == total(512, "h200")


def test_this_computer_is_estimated_and_its_ridge_has_a_decimal():
    here = figures.this_computer(28.5e9, 117e9)
    text = figures.bound_text(figures.bound(1, AUSTEN, here, 1e-6))
    # 4 · (256 · 1,024 + 256 + 1,024) B = 1.054 MB, over 28.5 GB/s 36.97 µs; 117 / 28.5 = 4.105
    assert "(ridge point 4.1)" in text and text.endswith("memory decides, about 37.0 µs.")


def test_what_the_page_says_of_the_panels_devices():
    """Rows at which another limit decides, found by going through all of them."""

    def first(key, shape, limit, launch=5e-6):
        return next(
            n for n in range(1, 1025) if figures.bound(n, shape, DEVICES[key], launch)["bound"] == limit
        )

    assert [first(key, LLAMA, "arithmetic") for key in ("h100-sxm", "h200")] == [326, 221]
    assert first("rtx-3060-laptop", GPT2, "arithmetic") == 90
    assert {figures.bound(n, GPT2, DEVICES["h100-sxm"], 5e-6)["bound"] for n in figures.ROWS} == {"launch"}
    assert figures.bound(1024, GPT2, DEVICES["h100-sxm"], 4e-6)["bound"] == "arithmetic"
    # A ridge point of 4.1 in float32: 9 rows.
    assert figures.rows_to_ridge(figures.this_computer(10e9, 41e9), *GPT2) == 9


def test_matrices_are_the_catalogues():
    assert list(figures.matrices().values()) == [AUSTEN, GPT2, LLAMA]
    c = kv.load_model("austen-gpt2").config
    assert (c.hidden_size, c.intermediate_size) == AUSTEN


def test_figure_leaves_out_what_is_not_known_and_marks_the_choice():
    known = figures.bound_figure(figures.bound(4, LLAMA, DEVICES["h100-sxm"], 5e-6))
    unknown = figures.bound_figure(figures.bound(4, LLAMA, DEVICES["apple-m4"], 5e-6))
    assert [trace.name for trace in known.data if trace.name not in {t.name for t in unknown.data}] == [
        "the arithmetic"
    ]
    chosen = known.data[-1]
    assert (list(chosen.x), list(chosen.y)) == ([4], [35.1])  # 117.588 MB over 3.35 TB/s, four digits


def test_every_setting_of_the_panel_is_fast_and_within_its_axis():
    slow = figures.this_computer(2e9, 13e9)
    panel = widgets.bound_panel(slow, here_launch=1e-6)
    panel.set(rows=2)
    seconds = []
    for matrix in figures.matrices():
        for _, key in panel.controls["device"].options:
            for rows in (1, 32, 1024):
                start = time.process_time()  # of this process alone: others may be busy
                text = panel.set(rows=rows, matrix=matrix, device=key)
                seconds.append(time.process_time() - start)
                assert "decides" in text and "does not work" not in text
                low, high = panel.figure.layout.yaxis.range
                assert 10**low <= panel.data["total"] * 1e6 <= 10**high
    assert sorted(seconds)[len(seconds) // 2] < 0.1  # the median: a collection of garbage may hold up a few
    assert "cpu-laptop" not in {key for _, key in panel.controls["device"].options}


def test_the_panel_uses_the_measured_call_here_and_a_launch_elsewhere():
    panel = widgets.bound_panel(figures.this_computer(29e9, 150e9), here_launch=7e-6)
    assert "Launch 7.00 µs" in panel.set(device="here")
    assert "Launch 5.00 µs" in panel.set(device="l4")


# --- no printed digit hangs on a rounding ----------------------------------------------------------


def page_panel_times():
    """Seconds of memory and arithmetic at the settings that the page prints."""
    for key, shape, choices in (
        ("h100-sxm", LLAMA, (1, 256, 512)),
        ("h200", LLAMA, (1, 256, 512)),
        ("h100-sxm", GPT2, (1, 1024)),
        ("rtx-3060-laptop", GPT2, (1, 64, 128)),
    ):
        for rows in choices:
            parts = figures.bound(rows, shape, DEVICES[key], figures.LAUNCH_SECONDS)["parts"]
            yield from (parts["memory"], parts["arithmetic"])


def test_printed_roundings_have_a_margin():
    """Digits of the page's compared lines, against float noise of 1e-12 and more."""
    h100 = DEVICES["h100-sxm"]
    llama = kv.sizing.weight_bytes(kv.catalogue()["llama-3.1-8b"], "float16")
    gpt2 = kv.sizing.weight_bytes(kv.catalogue()["gpt2"], "float16")
    austen = kv.sizing.weight_bytes(kv.load_model("austen-gpt2").config, "float16")
    printed = [
        *((size / 1e6, 1) for size in (austen, gpt2, llama)),
        *((size / h100.bandwidth * 1e3, 3) for size in (austen, gpt2, llama)),
        *((size / figures.PCIE5_BANDWIDTH * 1e3, 1) for size in (austen, gpt2, llama)),
        (h100.bandwidth / figures.PCIE5_BANDWIDTH, 0),
        *((100 * length * 200 / figures.timeline([length] * 200, 5)[-1][2], 0) for length in (2, 4, 6, 20)),
        *((device.ridge, 0) for device in DEVICES.values() if device.ridge),
        *((1e6 * seconds, 2) for seconds in page_panel_times()),
    ]
    for value, digits in printed:
        assert abs((value * 10**digits) % 1 - 0.5) > 1e-6, value


# --- the exercises -------------------------------------------------------------------------------


def right_by_events(stream, work, repeats, clock):
    stream.launch(work)
    first = stream.record()
    for _ in range(repeats):
        stream.launch(work)
    last = stream.record()
    last.synchronize()
    return last.seconds_since(first) / repeats


def timed(before=True, idle=True, inside=False, after=True, scale=1.0, more=0):
    def function(stream, work, repeats, clock):
        if before:
            stream.launch(work)
        if idle:
            stream.synchronize()
        start = clock()
        for _ in range(repeats + more):
            stream.launch(work)
            if inside:
                stream.synchronize()
        if after:
            stream.synchronize()
        return (clock() - start) / repeats * scale

    return function


def warm_up_that_waits(timing):
    def function(stream, work, repeats, clock):
        for _ in range(repeats):
            stream.launch(work)
            stream.record().synchronize()
        return timing(stream, work, repeats, clock)

    return function


def right_by_polling(stream, work, repeats, clock):
    stream.launch(work)
    event = stream.record()
    while not event.passed:
        pass
    first = stream.record()
    for _ in range(repeats):
        stream.launch(work)
    last = stream.record()
    while not last.passed:
        pass
    return last.seconds_since(first) / repeats


def all_work_in_one_launch(stream, work, repeats, clock):
    stream.launch(work)
    stream.synchronize()
    start = clock()
    stream.launch(lambda: [work() for _ in range(repeats)])
    stream.synchronize()
    return (clock() - start) / repeats


@pytest.mark.parametrize(
    "function",
    [
        right_by_events,
        timed(),
        warm_up_that_waits(right_by_events),
        warm_up_that_waits(timed()),
        right_by_polling,
        all_work_in_one_launch,
    ],
)
def test_right_ways_pass(function):
    assert checks.verdict("c.seconds_per_call", function).status == "right"


def once_by_events(stream, work, repeats, clock):
    stream.launch(work)
    first = stream.record()
    stream.launch(work)
    last = stream.record()
    last.synchronize()
    return last.seconds_since(first)


def known_before(stream, work, repeats, clock):
    clock()
    stream.launch(work)
    stream.synchronize()
    stream.record()
    return 1e-4


def events_with_a_wait_each(stream, work, repeats, clock):
    stream.launch(work)
    stream.synchronize()
    total = 0.0
    for _ in range(repeats):
        first = stream.record()
        stream.launch(work)
        last = stream.record()
        last.synchronize()
        total += last.seconds_since(first)
    return total / repeats


def events_unread(stream, work, repeats, clock):
    first = stream.record()
    stream.launch(work)
    return stream.record().seconds_since(first)


def both_readings_at_the_end(stream, work, repeats, clock):
    stream.launch(work)
    stream.synchronize()
    return clock() - clock()


@pytest.mark.parametrize(
    "function, words",
    [
        (timed(after=False), "at your second reading the device was still working"),
        (timed(idle=False), "still busy with earlier work"),
        (timed(before=False, idle=False), "still busy with earlier work"),
        (timed(before=False), "the first call on a device is slower"),
        (timed(more=-1), "between your readings stand 9 launches, not 10"),
        (timed(more=1), "between your readings stand 11 launches, not 10"),
        (once_by_events, "between your readings stands 1 launch, not 10"),
        (known_before, "between your readings stand 0 launches, not 10"),
        (timed(inside=True), "you wait after every launch"),
        (events_with_a_wait_each, "you wait after every launch"),
        (timed(scale=1e3), "looks like milliseconds"),
        (timed(scale=1e6), "looks like microseconds"),
        (timed(scale=0.5), "the device needs 100 µs for each"),
        (events_unread, "synchronize first, then read it"),
        (lambda stream, work, repeats, clock: stream.launch(work()), "launch(work), not launch(work())"),
        (lambda stream, work, repeats, clock: 1.0, "nothing was launched"),
        (lambda stream, work, repeats, clock: (clock(), clock()), "not seconds as one number"),
        (lambda stream, work, repeats, clock: stream.launch(work) or 1e-4, "neither clock() nor an event"),
        (both_readings_at_the_end, "0 seconds"),
    ],
)
def test_every_mistake_of_timing_is_named(function, words):
    outcome = checks.verdict("c.seconds_per_call", function)
    assert outcome.status == "wrong"
    assert words in outcome.message


def test_the_pretended_stream_behaves_as_the_real_one():
    """Same order of things: nothing done before a wait, and a wait ends when the work does."""
    stream = exercise.PretendedStream()
    event = stream.record()
    assert stream.now == 0 and not event.passed
    assert stream.now == exercise.LOOK  # so that who looks until it has passed comes to an end
    stream.launch(stream.work)
    assert stream.now == exercise.LOOK + exercise.LAUNCH and not event.passed
    stream.synchronize()
    assert event.passed and stream.now == exercise.BUSY + exercise.FIRST
    stream.launch(stream.work)
    last = stream.record()
    last.synchronize()
    assert last.seconds_since(event) == pytest.approx(exercise.FIRST + exercise.LAUNCH + exercise.EACH)


def test_an_error_names_what_the_function_was_called_with():
    said = checks.verdict("c.seconds_per_call", lambda *given: 1 / 0).message
    assert said.endswith("division by zero (called with stream, work, 10, clock)")


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda r, n, m, b: r * n * m / ((r * n + n * m + r * m) * b), "2 FLOPs, not 1"),
        (lambda r, n, m, b: r / b, "and the rows in and out are moved too"),
        (lambda r, n, m, b: (r * n + n * m + r * m) * b / (2 * r * n * m), "turn the fraction over"),
        (lambda r, n, m, b: 2 * r / b, "only the matrix is counted"),
        (lambda r, n, m, b: 2 * r * n * m / ((n * m + r * m) * b), "the rows that go in are missing"),
        (lambda r, n, m, b: 2 * r * n * m / ((n * m + r * n) * b), "the rows that come out are missing"),
        (lambda r, n, m, b: 2 * r * n * m / ((r * n + r * m) * b), "the matrix is missing"),
        (lambda r, n, m, b: 2 * n * m / ((n + n * m + m) * b), "once for every row"),
        (lambda r, n, m, b: 2 * r * n * m / (r * n + n * m + r * m), "this is FLOPs per number"),
        (lambda r, n, m, b: 2 * r * n * m * b / (r * n + n * m + r * m), "do not divide by it"),
        (lambda r, n, m, b: 2 * r * n * m, "these are the FLOPs"),
        (lambda r, n, m, b: 2 * r * n * m / ((n + n * m + m) * b), "counted with one row only"),
        (lambda r, n, m, b: r * m * (2 * n - 1) / ((r * n + n * m + r * m) * b), "1,535 FLOPs for each"),
        (lambda r, n, m, b: r * n * (2 * m - 1) / ((r * n + n * m + r * m) * b), "has n − 1 additions"),
        (lambda r, n, m, b: 12.0, "Print the FLOPs and the bytes"),
        (lambda r, n, m, b: "many", "not one number"),
    ],
)
def test_every_mistake_of_intensity_is_named(function, words):
    outcome = checks.verdict("c.arithmetic_intensity", function)
    assert outcome.status == "wrong"
    assert words in outcome.message


def test_the_checks_oracle_is_the_packages():
    for given in exercise.PRODUCTS:
        assert exercise._intensity(*given) == figures.product(*given).intensity


def test_wrong_intensities_differ_from_the_right_one():
    """Every line that a given product yields belongs to a number far from the right one."""
    for given in exercise.PRODUCTS:
        right = exercise._intensity(*given)
        close = [line for wrong, line in exercise._wrong_intensities(*given) if math.isclose(wrong, right)]
        # With one row "once" and "once for every row" are the same; the other two products tell.
        assert [line.partition(":")[0] for line in close] == (
            ["the matrix is counted once for every row", "x and the result are counted with one row only"]
            if given[0] == 1
            else []
        )


# --- break it --------------------------------------------------------------------------------------


def test_the_repaired_server_reads_every_prompt():
    solution = {}
    path = paths.chapters_dir() / "solutions" / "c_programs_on_a_gpu.py"
    exec(compile(path.read_text(encoding="utf-8"), path.name, "exec"), solution)
    prompts = np.random.default_rng(0).integers(0, 2048, (20, 8))
    for count in (1, 2, 3):
        buffers, read = [np.empty(8, np.int64) for _ in range(count)], []
        solution["serve"](streams.Stream(), prompts, lambda x, read=read: read.append(x.tolist()), buffers)
        assert read == prompts.tolist()
