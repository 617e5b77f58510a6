"""Solutions of primer C."""


def seconds_per_call(stream, work, repeats, clock):
    """Seconds that one `work` takes the device, without its slow first call."""
    stream.launch(work)  # the slow first call
    stream.synchronize()  # and everything that was in the queue before: the device is idle now
    start = clock()
    for _ in range(repeats):
        stream.launch(work)
    stream.synchronize()  # once, after the last launch
    return (clock() - start) / repeats


def arithmetic_intensity(rows, n_in, n_out, bytes_per_number):
    """FLOP per byte of x (rows, n_in) @ W (n_in, n_out)."""
    flops = 2 * rows * n_in * n_out
    numbers = rows * n_in + n_in * n_out + rows * n_out  # x and W are read, y is written
    return flops / (numbers * bytes_per_number)


def serve(stream, prompts, read, buffers):
    """Break it, repaired without a wait for the whole device: a buffer is filled again only when its
    copy has been made. `buffers` are arrays on the CPU's side, used in turn."""
    on_device = buffers[0].copy()
    copied = [stream.record() for _ in buffers]
    for number, prompt in enumerate(prompts):
        turn = number % len(buffers)
        copied[turn].synchronize()  # the copy that last used this buffer
        buffers[turn][:] = prompt
        stream.launch(on_device.__setitem__, slice(None), buffers[turn])
        copied[turn] = stream.record()
        stream.launch(read, on_device)
    stream.synchronize()
