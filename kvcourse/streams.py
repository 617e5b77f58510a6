"""A toy device with a queue: asynchronous work on a machine without a GPU.

`Stream` behaves like a CUDA stream in the four ways that a timer meets: `launch` returns at once, work is
done later and in order, `synchronize` waits, and an error shows up at the wait, not at the launch. The
device is a thread of this process, so nothing here says how fast a GPU is.
"""

import queue
import threading
import time
import weakref


class Event:
    """A mark that `Stream.record` puts between two pieces of work. The device notes the time when it gets
    there."""

    def __init__(self, device=None):
        self._passed = threading.Event()
        self._time = None
        self._device = device  # the thread that will get there

    @property
    def passed(self):
        """True once the device has got there."""
        return self._passed.is_set()

    def synchronize(self):
        """Wait until the device has got there. Errors of the work before it are left to the stream.

        Raises RuntimeError when the device itself, still on its way, calls it: it would wait for itself.
        """
        if not self.passed and threading.current_thread() is self._device:
            raise RuntimeError(
                "synchronize() within launched work would wait for itself: call it after launch"
            )
        self._passed.wait()

    def seconds_since(self, earlier):
        """Seconds of the device's clock from `earlier`, another event, to this one.

        Raises RuntimeError while either of them lies ahead of the device, as CUDA does, and where the
        clock failed.
        """
        if not (self.passed and earlier.passed):
            raise RuntimeError("the device has not reached this event yet: synchronize first, then read it")
        if self._time is None or earlier._time is None:
            raise RuntimeError("the clock failed at this event: stream.synchronize() raises its error")
        return self._time - earlier._time


class Stream:
    """A queue of work and a thread that does it, one piece after another.

    `clock` gives the seconds that events note. Work that follows a failed piece is dropped until
    `synchronize` has raised the error; events among it pass all the same, so that nobody waits for ever.
    A clock that fails is an error like that of work. The thread ends after the stream's last work, once
    nobody holds the stream. Raises TypeError for a clock that is no function.
    """

    def __init__(self, clock=time.perf_counter):
        if not callable(clock):
            raise TypeError(f"clock takes a function that gives seconds, got {type(clock).__name__}")
        self._queue = queue.SimpleQueue()
        self._errors = []  # at most one: the first
        given = self._queue, clock, self._errors  # not self: the thread would keep the stream alive
        self._thread = threading.Thread(target=_device, args=given, name="device", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)

    def launch(self, work, *args):
        """Put the call work(*args) into the queue and return at once; its result is dropped.

        The arguments are not copied: what they hold when the device gets there is what counts. Raises
        TypeError for work that is no function, such as a product that is already computed.
        """
        if not callable(work):
            raise TypeError(
                f"launch takes a function and its arguments, got {type(work).__name__}: "
                "write launch(np.matmul, x, w, y), not launch(x @ w)"
            )
        self._queue.put((work, args))

    def record(self):
        """Put an Event into the queue, after all work launched so far, and return it."""
        event = Event(self._thread)
        self._queue.put(event)
        return event

    def synchronize(self):
        """Wait until all work launched so far is done. Raises the first error among it, once.

        Raises RuntimeError when the device itself calls it: it would wait for its own end.
        """
        self.record().synchronize()
        if self._errors:
            raise self._errors.pop()


def _device(work_queue, clock, errors):
    """The thread of a stream: all that is in the queue, up to None."""
    while (item := work_queue.get()) is not None:
        # BaseException: an exit() in the work would end the thread, and then every wait hangs.
        try:
            if isinstance(item, Event):
                item._time = clock()
            elif not errors:
                work, args = item
                work(*args)
        except BaseException as error:
            if not errors:
                errors.append(error)
        if isinstance(item, Event):
            item._passed.set()
        item = work = args = None  # else the last work's arrays stay alive until the next piece comes
