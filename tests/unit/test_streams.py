"""The toy device: launches return at once, work keeps its order, waits wait, errors come late."""

import gc
import threading
import weakref

import numpy as np
import pytest

from kvcourse.streams import Event, Stream

PATIENCE = 30  # seconds before a wait that should end counts as hung


def counting_clock():
    """1.0, 2.0, 3.0 …: a clock that says how often it was read."""
    readings = iter(range(1, 1000))
    return lambda: float(next(readings))


def test_launch_returns_while_the_device_is_held():
    stream, gate, done = Stream(), threading.Event(), []
    stream.launch(gate.wait, PATIENCE)
    stream.launch(done.append, "work")
    event = stream.record()
    assert done == [] and not event.passed
    gate.set()
    stream.synchronize()
    assert done == ["work"] and event.passed


def test_work_is_done_in_order_and_by_another_thread():
    stream, order, workers = Stream(), [], set()
    for number in range(200):
        stream.launch(order.append, number)
    stream.launch(lambda: workers.add(threading.current_thread()))
    stream.synchronize()
    assert order == list(range(200))
    assert len(workers) == 1 and threading.current_thread() not in workers


def test_arguments_are_read_when_the_device_gets_there():
    stream, gate, seen = Stream(), threading.Event(), []
    x = np.ones(3)
    stream.launch(gate.wait, PATIENCE)
    stream.launch(lambda array: seen.append(array.tolist()), x)
    x[:] = 7
    gate.set()
    stream.synchronize()
    assert seen == [[7.0, 7.0, 7.0]]


def test_events_measure_between_them_on_the_devices_clock():
    stream = Stream(clock=counting_clock())
    first = stream.record()
    stream.launch(int)
    second = stream.record()
    third = stream.record()
    stream.synchronize()
    assert (second.seconds_since(first), third.seconds_since(first)) == (1.0, 2.0)
    assert first.seconds_since(third) == -2.0


def test_an_event_ahead_of_the_device_has_no_time():
    stream, gate = Stream(), threading.Event()
    before = stream.record()
    stream.launch(gate.wait, PATIENCE)
    after = stream.record()
    with pytest.raises(RuntimeError, match="not reached this event yet: synchronize first"):
        after.seconds_since(before)
    gate.set()
    after.synchronize()
    assert after.seconds_since(before) >= 0
    with pytest.raises(RuntimeError, match="not reached this event yet"):
        after.seconds_since(Event())


def test_waiting_for_an_event_does_not_wait_for_what_follows():
    stream, gate = Stream(), threading.Event()
    first = stream.record()
    stream.launch(gate.wait, PATIENCE)
    last = stream.record()
    first.synchronize()
    assert not last.passed
    gate.set()
    last.synchronize()


def test_an_error_surfaces_at_synchronize_once_and_drops_what_follows():
    stream, done = Stream(), []
    stream.launch(done.append, "before")
    stream.launch(lambda: 1 / 0)
    stream.launch(done.append, "after")
    stream.launch(lambda: [][1])
    event = stream.record()
    event.synchronize()  # passes all the same
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    assert done == ["before"]
    stream.synchronize()
    stream.launch(done.append, "again")
    stream.synchronize()
    assert done == ["before", "again"]


def test_an_exit_in_the_work_does_not_end_the_device():
    stream = Stream()
    stream.launch(exit)
    with pytest.raises(SystemExit):
        stream.synchronize()
    stream.synchronize()


def test_work_that_waits_for_its_own_stream_is_refused():
    stream = Stream()
    stream.launch(stream.synchronize)
    with pytest.raises(RuntimeError, match="would wait for itself"):
        stream.synchronize()


def test_work_that_waits_for_an_event_of_its_own_stream_is_refused():
    stream, gate, events = Stream(), threading.Event(), []
    stream.launch(gate.wait, PATIENCE)
    stream.launch(lambda: events[0].synchronize())
    events.append(stream.record())
    gate.set()
    with pytest.raises(RuntimeError, match="would wait for itself"):
        stream.synchronize()
    stream.launch(events[0].synchronize)  # passed by now: nothing to wait for
    stream.synchronize()


def test_a_clock_that_fails_is_an_error_of_the_stream_and_nobody_hangs():
    stream = Stream(clock=lambda: 1 / 0)
    first, second = stream.record(), stream.record()
    second.synchronize()
    with pytest.raises(RuntimeError, match="the clock failed at this event"):
        second.seconds_since(first)
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    stream = Stream(clock=lambda: 1 / 0)
    stream.launch(lambda: [][1])
    with pytest.raises(IndexError):  # the first error, though the clock failed after it
        stream.synchronize()


def test_a_clock_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="clock takes a function that gives seconds, got NoneType"):
        Stream(clock=None)


def test_the_thread_of_a_dropped_stream_does_its_work_and_ends():
    stream, done, device = Stream(), [], []
    stream.launch(lambda: device.append(threading.current_thread()))
    stream.synchronize()
    stream.launch(done.append, "last")
    del stream
    gc.collect()
    device[0].join(PATIENCE)
    assert not device[0].is_alive() and done == ["last"]


def test_two_streams_run_side_by_side_and_an_event_orders_them():
    one, other, gate, order = Stream(), Stream(), threading.Event(), []
    one.launch(gate.wait, PATIENCE)
    one.launch(order.append, "one")
    event = one.record()
    other.launch(order.append, "other, at once")
    other.synchronize()
    other.launch(event.synchronize)
    other.launch(order.append, "other, after one")
    gate.set()
    other.synchronize()
    assert order == ["other, at once", "one", "other, after one"]


def test_a_computed_product_is_no_work():
    with pytest.raises(TypeError, match=r"got ndarray: write launch\(np.matmul, x, w, y\)"):
        Stream().launch(np.ones((2, 2)) @ np.ones((2, 2)))


def test_an_idle_device_keeps_no_array_alive():
    stream, x = Stream(), np.ones(3)
    stream.launch(np.copy, x)
    stream.synchronize()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
