"""`GraphedDecode`: one decode step recorded once as a CUDA graph and replayed with a single launch."""

import torch

from kvcourse.torch_models.cache import BatchCache

WARMUP = 3  # steps before recording: libraries allocate their workspaces at the first use


class GraphedDecode:
    """`graphed(tokens)` is `net.decode(tokens, cache)` with one launch instead of one an operation.

    net    a GPT2 on a CUDA device
    cache  the BatchCache it steps through; the graph holds its addresses, so it serves this one only
    span   rows that attention reads: a graph repeats the same work whatever the lengths are, so it
           reads so many rows every time, and a mask made from the lengths on the device hides the
           rest (default: the cache's max_seq_len)

    The cache's lengths lie on the device and grow inside the graph. After recording, the cache
    holds what it held before. Raises RuntimeError without a CUDA device, ValueError for a span
    outside the cache, CacheFull when no row is free.
    """

    def __init__(self, net, cache, span=None):
        _check_device(net.device)
        net.check_cache(cache)
        if type(cache) is not BatchCache:
            raise TypeError(
                f"a graph of a {type(cache).__name__} is not supported: use net.decode, or a BatchCache"
            )
        span = cache.max_seq_len if span is None else span
        if not 1 <= span <= cache.max_seq_len:
            raise ValueError(f"span {span} is outside 1 … {cache.max_seq_len:,}, the rows of the cache")
        self.net, self.cache, self.span = net, cache, span
        self._check_room()
        with torch.cuda.device(net.device):
            self._record()

    def __call__(self, tokens):
        """The next step; logits (batch, vocab_size) in one tensor that every call overwrites.

        `tokens` and errors as in `GPT2.decode`; CacheFull also when a sequence outgrows the span.
        """
        self.net.check_cache(self.cache)
        tokens = self.net.next_tokens(tokens, self.cache)
        self._check_room()
        self._tokens.copy_(tokens)
        self.cache.begin_growing()
        self._graph.replay()
        self.cache.end_growing()
        return self._logits

    def _check_room(self):
        self.cache.check_room(self.span)

    @torch.no_grad()
    def _record(self):
        """Run the step a few times on a side stream, then once more under capture."""
        self._tokens = torch.zeros(self.cache.batch, dtype=torch.int64, device=self.net.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):  # writes the same free row each time: the lengths do not move
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):  # records the launches, runs none of them
            self._logits = self._recorded()

    def _recorded(self):
        logits = self._step()
        self.cache.lengths.add_(1)
        return logits

    def _step(self):
        return self.net.step(self._tokens, self.cache, self.span, self.cache.mask(self.span))


def _check_device(device):
    if device.type != "cuda":
        raise RuntimeError(
            f"a CUDA graph needs a CUDA device, this model is on {device}: use net.decode there"
        )
