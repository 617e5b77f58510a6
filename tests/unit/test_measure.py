"""Timing with a fake clock: nothing here depends on how fast this machine is."""

import dataclasses
import json
import mmap
import sys
import types

import numpy as np
import pytest

from kvcourse import measure


class FakeClock:
    """A clock that only moves when a call says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def call_taking(self, *seconds):
        """A function whose successive calls take these seconds (the last one for good)."""
        left = list(seconds)

        def fn():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return fn


@pytest.fixture
def clock(monkeypatch):
    """A fake clock on a quiet machine of 4 cores whose NumPy uses 2 threads."""
    fake = FakeClock()
    monkeypatch.setattr(measure, "_clock", fake)
    monkeypatch.setattr(measure, "threads", lambda: 2)
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(measure, "_calibrate", lambda: (0.9, 1.0))
    monkeypatch.setattr(measure, "_cpu_seconds", lambda: (fake.now, 2 * fake.now, 2 * fake.now))
    monkeypatch.setattr(measure, "_settle", lambda: None)
    return fake


def test_warmup_is_not_counted_and_every_repeat_is(clock):
    timing = measure.time_call(clock.call_taking(9, 9, 0.3, 0.2, 0.4), repeats=3, warmup=2)
    assert timing.samples == pytest.approx((0.3, 0.2, 0.4))
    assert timing.min == pytest.approx(0.2)
    assert timing.median == pytest.approx(0.3)
    assert not timing.disturbed and timing.why == ""


def test_the_default_is_seven_repeats_after_two_warmups(clock):
    calls = []
    timing = measure.time_call(lambda: calls.append(clock.call_taking(1)()))
    assert len(timing.samples) == 7 and len(calls) == 9


def test_a_timing_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        measure.Timing((1.0,)).why = "no"


@pytest.mark.parametrize(("repeats", "warmup"), [(0, 2), (7, -1)])
def test_no_repeats_or_negative_warmup_is_an_error(repeats, warmup):
    with pytest.raises(ValueError, match=f"repeats={repeats}, warmup={warmup}: give at least"):
        measure.time_call(lambda: None, repeats=repeats, warmup=warmup)


def test_step_times_far_apart_are_a_disturbance(clock):
    timing = measure.time_call(clock.call_taking(1, 2, 2), repeats=3, warmup=0)
    assert timing.disturbed
    assert timing.why == "the median call took 2.0x the fastest"
    assert str(timing) == "1.00 s (disturbed)"


def test_one_slow_call_among_many_is_none(clock):
    assert not measure.time_call(clock.call_taking(1, 9, 1, 1), repeats=7, warmup=0).disturbed


def test_all_calls_ten_times_too_slow_are_a_disturbance(clock, monkeypatch):
    monkeypatch.setattr(measure, "_calibrate", lambda: (10.0, 1.0))
    timing = measure.time_call(clock.call_taking(1), warmup=0)
    assert timing.why == "a product took 10x longer with 2 threads than with one"


def test_with_one_thread_there_is_nothing_to_calibrate(clock, monkeypatch):
    monkeypatch.setattr(measure, "threads", lambda: 1)
    monkeypatch.setattr(measure, "_calibrate", lambda: pytest.fail("calibrated"))
    assert not measure.time_call(clock.call_taking(1)).disturbed


def test_other_programs_on_our_cores_are_a_disturbance(clock, monkeypatch):
    # Everybody's processor time grows 2 (ours) + 3 seconds a second: 4 cores leave 1 of the 2 we need.
    monkeypatch.setattr(measure, "_cpu_seconds", lambda: (clock.now, 5 * clock.now, 2 * clock.now))
    assert measure.time_call(clock.call_taking(1)).why == "other programs kept 3.0 of 4 cores busy"


@pytest.mark.parametrize(("others", "seconds"), [(2.4, 1.0), (3.0, 0.01)])
def test_other_programs_on_spare_cores_or_too_short_to_tell_are_none(clock, monkeypatch, others, seconds):
    spent = 2 + others
    monkeypatch.setattr(measure, "_cpu_seconds", lambda: (clock.now, spent * clock.now, 2 * clock.now))
    assert not measure.time_call(clock.call_taking(seconds)).disturbed


def test_a_disturbed_run_is_refused_in_one_line_where_quiet_is_required(clock):
    calls = clock.call_taking(1, 2, 2)
    with pytest.raises(measure.MeasurementDisturbed) as error:
        measure.time_call(calls, repeats=3, warmup=0, require_quiet=True)
    assert str(error.value) == (
        "measurement refused: the median call took 2.0x the fastest; close other programs and run it again"
    )


def test_blocks_run_one_after_the_other(clock):
    order = []
    calls = {name: lambda name=name: (order.append(name), clock.call_taking(1)()) for name in "ab"}
    timings = measure.time_blocks(calls, repeats=2, warmup=1)
    assert list(timings) == ["a", "b"] and "".join(order) == "aaabbb"


def test_the_gpu_is_waited_for_only_where_torch_uses_one(clock, monkeypatch):
    waited = []
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: waited.append(1))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    measure.time_call(clock.call_taking(1), repeats=3, warmup=2)
    assert len(waited) == 4  # once before the first clock reading, once a repeat
    cuda.is_initialized = lambda: False
    measure.time_call(clock.call_taking(1), repeats=3, warmup=2)
    assert len(waited) == 4


def test_the_real_calibration_and_counters_give_numbers():
    many, one = measure._calibrate(repeats=1)
    assert many > 0 and one > 0
    before, after = measure._cpu_seconds(), measure._cpu_seconds()
    assert all(now >= then >= 0 for now, then in zip(after, before, strict=True))


def test_calibration_gives_the_threads_back():
    before = measure.threads()
    measure._calibrate(repeats=1)
    assert measure.threads() == before


def test_memory_that_is_touched_is_counted():
    faults, before = measure.page_faults(), measure.resident_bytes()
    # 64 MiB from the system: an allocator may have as much at hand, freed by a test before this one.
    touched = np.frombuffer(mmap.mmap(-1, 2**26), np.uint8)
    touched[:] = 1
    assert measure.resident_bytes() - before > 2**25  # half of it: other memory may be freed meanwhile
    assert faults is None or measure.page_faults() > faults
    assert touched[-1] == 1


def test_memory_that_is_only_reserved_is_not_counted():
    before = measure.resident_bytes()
    reserved = np.zeros(2**28, np.uint8)  # 256 MiB
    assert measure.resident_bytes() - before < 2**26  # a quarter: room for what else a process does meanwhile
    assert reserved.nbytes == 2**28


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234, "1.23 s"), (2400.0, "2,400 s"), (0.0456, "45.6 ms"), (0.437, "437 ms"), (7.89e-6, "7.89 µs")],
)
def test_seconds_are_written_in_the_unit_that_fits(seconds, text):
    assert measure.format_seconds(seconds) == text


def test_the_machine_is_described_without_naming_anybody():
    described = measure.describe_machine()
    assert described["numpy"] == np.__version__
    assert described["cpu"] and described["blas"]
    assert ("torch" in described) == ("torch" in sys.modules)
    assert "/" not in "".join(str(described[key]) for key in ("cpu", "os", "python"))
    json.dumps(described)


# --- recorded runs -------------------------------------------------------------------

GOOD = {
    "kind": "numpy",
    "command": "kvcourse bench numpy",
    "date": "2026-01-31",
    "machine": {"cpu": "Some CPU", "threads": 2},
    "versions": {"numpy": "2.4"},
    "results": {"step": [0.1]},
}


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_measurements_dir", lambda: tmp_path)

    def put(name, **changes):
        (tmp_path / f"{name}.json").write_text(json.dumps(GOOD | changes), encoding="utf-8")

    return put


def test_a_recorded_run_is_read_and_labelled(store):
    store("one")
    run = measure.load_recorded("one")
    assert (run.name, run.kind, run.results) == ("one", "numpy", {"step": [0.1]})
    assert run.label == "recorded 2026-01-31: Some CPU, 2 threads"


def test_runs_of_a_kind_come_oldest_first(store):
    store("a", date="2026-02-01")
    store("b")
    store("c", kind="torch")
    assert [run.name for run in measure.recorded_runs("numpy")] == ["b", "a"]
    assert measure.recorded_runs("none") == []


def test_an_unknown_name_lists_those_there_are(store):
    with pytest.raises(ValueError, match="no recorded run 'x': there are none yet"):
        measure.load_recorded("x")
    store("one")
    with pytest.raises(ValueError, match="no recorded run 'x': there are one"):
        measure.load_recorded("x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"date": "yesterday"}, "one.json: date 'yesterday' is not YYYY-MM-DD"),
        ({"kind": 3}, "one.json: kind is 3, it must be a filled str"),
        ({"results": {}}, "one.json: results is {}, it must be a filled dict"),
        ({"machine": {"cpu": "Some CPU"}}, "one.json: machine lacks threads"),
        ({"host": "mine"}, "one.json is no recorded run"),
    ],
)
def test_a_wrong_record_is_one_line(store, changes, message):
    store("one", **changes)
    with pytest.raises(ValueError) as error:
        measure.load_recorded("one")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_record_that_is_not_json_is_one_line(store, tmp_path):
    (tmp_path / "one.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="one.json is not JSON .* restore it with git checkout"):
        measure.load_recorded("one")


def test_every_committed_run_is_whole():
    for path in measure._measurements_dir().glob("*.json"):
        run = measure.read_recorded(path)
        # The kind is the bench's name, and for a shape other than its first that name and a word more.
        assert run.command.startswith(f"kvcourse bench {run.kind.partition('-')[0]}")


def test_disturbed_measurements_in_one_line():
    assert measure.disturbed_line([("250 tokens", ""), ("500 tokens", "")], "calls") == ""
    reasons = [("1", ""), ("8", "other programs were busy"), ("32", "it was slow")]
    line = "disturbed, do not quote (2 of 3 sizes): at 8 other programs were busy"
    assert measure.disturbed_line(reasons, "sizes") == line
