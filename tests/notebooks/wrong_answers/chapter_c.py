"""Typical wrong answers of primer C."""


def _queueing(stream, work, repeats, clock):
    stream.launch(work)
    stream.synchronize()
    start = clock()
    for _ in range(repeats):
        stream.launch(work)
    return (clock() - start) / repeats


def _busy_at_the_start(stream, work, repeats, clock):
    stream.launch(work)
    start = clock()
    for _ in range(repeats):
        stream.launch(work)
    stream.synchronize()
    return (clock() - start) / repeats


def _one_by_one(stream, work, repeats, clock):
    stream.launch(work)
    stream.synchronize()
    start = clock()
    for _ in range(repeats):
        stream.launch(work)
        stream.synchronize()
    return (clock() - start) / repeats


def _with_the_first_call(stream, work, repeats, clock):
    stream.synchronize()
    start = clock()
    for _ in range(repeats):
        stream.launch(work)
    stream.synchronize()
    return (clock() - start) / repeats


def _not_divided(stream, work, repeats, clock):
    stream.launch(work)
    stream.synchronize()
    start = clock()
    for _ in range(repeats):
        stream.launch(work)
    stream.synchronize()
    return clock() - start


def _first_call_among_the_repeats(stream, work, repeats, clock):
    stream.launch(work)
    stream.synchronize()
    start = clock()
    for _ in range(repeats - 1):
        stream.launch(work)
    stream.synchronize()
    return (clock() - start) / repeats


def _once(stream, work, repeats, clock):
    stream.launch(work)
    stream.synchronize()
    start = clock()
    stream.launch(work)
    stream.synchronize()
    return clock() - start


def _known_before(stream, work, repeats, clock):
    clock()
    stream.launch(work)
    stream.synchronize()
    return 1e-4


def _by_the_cpu(stream, work, repeats, clock):
    start = clock()
    for _ in range(repeats):
        work()
    return (clock() - start) / repeats


def _one_flop(rows, n_in, n_out, bytes_per_number):
    return rows * n_in * n_out / ((rows * n_in + n_in * n_out + rows * n_out) * bytes_per_number)


def _matrix_only(rows, n_in, n_out, bytes_per_number):
    return 2 * rows * n_in * n_out / (n_in * n_out * bytes_per_number)


def _matrix_per_row(rows, n_in, n_out, bytes_per_number):
    return 2 * n_in * n_out / ((n_in + n_in * n_out + n_out) * bytes_per_number)


def _rows_moved_once(rows, n_in, n_out, bytes_per_number):
    return 2 * rows * n_in * n_out / ((n_in + n_in * n_out + n_out) * bytes_per_number)


WRONG = {
    "c.seconds_per_call": [
        (_queueing, "Synchronize before it"),
        (_busy_at_the_start, "synchronize before the first reading"),
        (_one_by_one, "you wait after every launch"),
        (_with_the_first_call, "the first call on a device is slower"),
        (_not_divided, "divide by repeats"),
        (_first_call_among_the_repeats, "9 launches, not 10"),
        (_once, "between your readings stands 1 launch, not 10"),
        (_known_before, "between your readings stand 0 launches"),
        (_by_the_cpu, "you called work() yourself"),
    ],
    "c.arithmetic_intensity": [
        (_one_flop, "2 FLOPs, not 1"),
        (_matrix_only, "only the matrix is counted"),
        (_matrix_per_row, "once for every row"),
        (_rows_moved_once, "counted with one row only"),
    ],
}
