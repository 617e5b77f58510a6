"""Times the Triton decode kernel on a CUDA device: how much of the copy bandwidth it reaches.

Llama-3.1-8B's heads (32 query, 8 KV, 128 wide), blocks of 16 shuffled over the pool, batch x context from
1 x 512 to 256 x 4,096, float16 and bfloat16. Beside it scaled_dot_product_attention on contiguous caches
and PyTorch's flex attention on page tables, each answer compared with the reference first. The L2 cache
is overwritten before each call. A size that does not fit is named and left out. --out keeps a recorded run.
Without a GPU only --interpret runs: tiny shapes in Triton's interpreter, answers compared, nothing timed.
"""

import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch

from kvcourse import kernels, measure
from kvcourse.bench import numpy_gpt2
from kvcourse.cli import CommandError
from kvcourse.torch_models.timing import event_seconds

KIND = "kernel"
HEADS = (32, 8, 128)  # num_heads, num_kv_heads, head_dim of Llama 3.1 8B
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (512, 4096)
DTYPES = (torch.float16, torch.bfloat16)
BLOCK_SIZE = 16
FLEX_PAGE = 128  # flex attention's own block: smaller pages leave its tiles unfilled
WARMUP, ATTEMPTS = 3, 3
COPY_BYTES = 2**30
FLUSH_BYTES = 2**29  # at least, and four times the L2 cache
MEMORY_SHARE = 0.9  # of the free memory that a size may take
WAYS = ("kernel", "contiguous", "flex")  # methods of Problem
LARGE, TARGET = 2**18, 0.70  # from 262,144 tokens on, 70 % of the copy bandwidth is the aim
TINY = {"heads": (4, 2, 16), "batches": (1, 3), "contexts": (40,), "dtypes": (torch.float32, *DTYPES)}
# Largest difference from the reference, as a share of the largest value in V. u is a format's rounding
# unit: both answers are rounded (2u), the softmax weights too (u), and a peer's partial answers (u).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4 * 2**-11, torch.bfloat16: 4 * 2**-8}


def add_arguments(parser):
    """The options of `kvcourse bench kernel`."""
    parser.add_argument("--repeats", type=numpy_gpt2.count, default=30, help="calls timed (default: 30)")
    parser.add_argument(
        "--interpret", action="store_true", help="no GPU: compare answers at tiny shapes, time nothing"
    )
    parser.add_argument(
        "--out",
        nargs="?",
        const="",
        metavar="FILE",
        help="keep the run as a JSON file (default: data/measurements/kernel-<device>.json)",
    )


def main(args):
    """Time and print the table, keep the run where --out asks; with --interpret only compare answers.

    Raises CommandError without Triton or a CUDA device, when --out cannot be written, or for a
    disturbed run that is to be kept; ValueError for a wrong answer.
    """
    if not kernels.available():
        raise CommandError("bench kernel needs Triton: on Linux `pip install -e '.[kernels]'` brings it")
    if args.interpret:
        if args.out is not None:
            raise CommandError("--interpret times nothing that --out could keep: leave one of them out")
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernel's module is imported
        for line in smoke():
            print(line)
        return
    if not torch.cuda.is_available():
        raise CommandError(
            "bench kernel needs a CUDA device, PyTorch finds none: run it on a machine that has one "
            "(here `--interpret` compares the answers)"
        )
    card = torch.cuda.get_device_properties(0)
    path = Path(args.out) if args.out else numpy_gpt2.default_path(card.name, KIND)
    if args.out is not None:
        numpy_gpt2.check_writable(path)
    run = time_everything(ColdTimer(args.repeats, card.L2_cache_size))
    run["command"] = f"kvcourse bench {KIND} --repeats {args.repeats}"
    run["machine"] |= {"gpu": card.name, "gpu_bytes": card.total_memory, "l2_bytes": card.L2_cache_size}
    run["versions"]["cuda"] = torch.version.cuda
    print(table(run))
    numpy_gpt2.keep(run, path, asked=args.out is not None)


def smoke():
    """One line a tiny size: the kernel's and both peers' largest difference from the reference; on a CPU."""
    for dtype in TINY["dtypes"]:
        for context in TINY["contexts"]:
            for batch in TINY["batches"]:
                with warnings.catch_warnings():  # flex says that it is slow when it is not compiled
                    warnings.filterwarnings("ignore", message="flex_attention called without")
                    found = compared(Problem(batch, context, dtype, TINY["heads"], "cpu"))
                differences = ", ".join(f"{name} {share:.1g}" for name, share in found.items())
                yield f"{_name(dtype)}, batch {batch}, {context} tokens: {differences} of the largest value"


class Problem:
    """One size: random q and pool, shuffled tables, the same rows contiguous, and the page tables of flex.

    All sequences have `context` tokens. Each way is a method that returns (call, tables): a function
    without arguments that gives (batch, num_heads, head_dim), and the way's own tables where it has some.
    """

    def __init__(self, batch, context, dtype, heads=HEADS, device="cuda"):
        self.batch, self.context, self.dtype, self.device = batch, context, dtype, device
        num_heads, self.num_kv_heads, self.head_dim = heads
        random = torch.Generator(device).manual_seed(batch * context)
        new = partial(torch.randn, generator=random, device=device, dtype=dtype)
        self.q = new(batch, num_heads, self.head_dim)
        per_sequence = -(-context // FLEX_PAGE) * FLEX_PAGE // BLOCK_SIZE
        shape = (batch * per_sequence, BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        self.k_cache, self.v_cache = new(*shape), new(*shape)
        order = torch.randperm(shape[0], generator=random, device=device, dtype=torch.int32)
        self.tables = order.view(batch, per_sequence)[:, : -(-context // BLOCK_SIZE)].contiguous()
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=device)

    def nbytes(self):
        """Bytes that one call must move: K and V of every token, the tables, q and the answer."""
        rows = self.batch * self.context * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * rows + self.tables.nbytes + self.lengths.nbytes + 2 * self.q.nbytes

    def kernel(self):
        """The course's kernel."""
        given = (self.q, self.k_cache, self.v_cache, self.tables, self.lengths)
        return partial(kernels.paged_attention_decode, *given, check_tables=False), None

    def contiguous(self):
        """scaled_dot_product_attention on the same rows, stored in order."""
        k, v = (
            cache[self.tables.long()].flatten(1, 2)[:, : self.context].transpose(1, 2).contiguous()
            for cache in (self.k_cache, self.v_cache)
        )  # (batch, num_kv_heads, context, head_dim)
        attend = torch.nn.functional.scaled_dot_product_attention
        call = partial(attend, self.q[:, :, None], k, v, enable_gqa=True)
        return lambda: call()[:, :, 0], None

    def flex(self):
        """Flex attention on pages of FLEX_PAGE rows: the pool's rows in its layout, and tables of its own."""
        from torch.nn.attention.experimental._paged_attention import PagedAttention
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        pages = self.k_cache.shape[0] * BLOCK_SIZE // FLEX_PAGE
        paged = PagedAttention(pages, FLEX_PAGE, self.batch, device=self.device)
        length = torch.tensor(self.context, device=self.device)
        for row in range(self.batch):
            paged.reserve(torch.tensor(row, device=self.device), length)
        logical = create_block_mask(
            lambda b, h, query, token: token < self.context,
            self.batch, None, 1, pages // self.batch * FLEX_PAGE,
            device=self.device, BLOCK_SIZE=(FLEX_PAGE, FLEX_PAGE),
        )  # fmt: skip
        mask = paged.convert_logical_block_mask(logical, kv_len=self.lengths)
        k, v = (  # (1, num_kv_heads, pages × FLEX_PAGE, head_dim), as PagedAttention.assign has it
            cache.flatten(0, 1)[None].transpose(1, 2).contiguous() for cache in (self.k_cache, self.v_cache)
        )
        if self.device != "cpu":  # there it is slow either way
            torch._dynamo.reset()  # one compilation a size, however many there were
            flex_attention = torch.compile(flex_attention, dynamic=False)
        call = partial(flex_attention, self.q[:, :, None], k, v, block_mask=mask, enable_gqa=True)
        return lambda: call()[:, :, 0], paged.page_table[:, : pages // self.batch].int()

    def reference(self, tables=None):
        """The right answer for these tables (batch, max_blocks); default the kernel's own."""
        caches, size = (self.k_cache, self.v_cache), BLOCK_SIZE
        if tables is not None:
            size = FLEX_PAGE
            caches = (cache.view(-1, size, *cache.shape[2:]) for cache in caches)
        return kernels.paged_attention_reference(
            self.q, *caches, self.tables if tables is None else tables, self.lengths
        )

    def difference(self, name, answer, expected):
        """Largest difference as a share of the largest value; ValueError beyond TOLERANCE, or for a NaN."""
        share = ((answer.float() - expected.float()).abs().max() / self.v_cache.abs().max()).item()
        if not share <= TOLERANCE[self.dtype]:
            raise ValueError(
                f"{name}, {_name(self.dtype)}, batch {self.batch}, {self.context} tokens: {share:.2g} of the "
                f"largest value from the reference, not ≤ {TOLERANCE[self.dtype]:.2g}: not the same answer"
            )
        return share


def compared(problem):
    """{name: largest difference from the reference} of the kernel and both peers."""
    found = {}
    for name in WAYS:
        call, tables = getattr(problem, name)()
        found[name] = problem.difference(name, call(), problem.reference(tables))
    return found


# --- timing -----------------------------------------------------------------------


class ColdTimer:
    """Times calls on the current CUDA device, its L2 cache overwritten before each; a measure.Timing."""

    def __init__(self, repeats, l2_bytes):
        self.repeats = repeats
        self.flush = torch.empty(max(FLUSH_BYTES, 4 * l2_bytes), dtype=torch.uint8, device="cuda")

    def __call__(self, fn):
        """Seconds by the device's clock. The host runs ahead while the flush is written, so that the
        device does not wait for the launch."""
        return event_seconds(fn, self.repeats, WARMUP, "cuda", before=self.flush.zero_)


def time_everything(timer, device="cuda", heads=HEADS, batches=BATCHES, contexts=CONTEXTS, dtypes=DTYPES):
    """A recorded run as a dict, its `command` empty; `timer(fn)` gives a measure.Timing.

    results["points"] has {dtype, context, batch, bytes, and seconds: kernel, contiguous, flex}, the
    last two where they ran; results["copy"] bytes a second of a large copy, read and written.
    """
    disturbed, notes, points = [], [], []
    quiet = partial(_quiet, timer, disturbed)
    copy = _copy_bandwidth(quiet, device)
    for dtype in dtypes:
        for context in contexts:
            for batch in batches:
                label = f"{_name(dtype)}, {context:,} tokens, batch {batch}"
                if _fits(label, batch, context, dtype, heads, device, notes):
                    points.append(_point(Problem(batch, context, dtype, heads, device), label, quiet, notes))
    described = measure.describe_machine()
    import triton

    return {
        "kind": KIND,
        "command": "",
        "date": described["date"],
        "machine": {name: described[name] for name in ("cpu", "cores", "os", "threads")},
        "versions": {"python": described["python"], "torch": torch.__version__, "triton": triton.__version__},
        "results": {
            "shape": "{} query heads over {} KV heads, {} wide".format(*heads) + f", blocks of {BLOCK_SIZE}",
            "statistic": f"fastest of {timer.repeats}, L2 cache overwritten before each call",
            "copy": round(copy),
            "points": points,
            "disturbed": disturbed,
            "notes": notes,
        },
    }


def _point(problem, label, quiet, notes):
    """Compare, then time, each of the three ways. A peer that fails is noted with its first line."""
    point = {"dtype": _name(problem.dtype), "context": problem.context, "batch": problem.batch}
    point["bytes"] = problem.nbytes()
    for name in WAYS:
        try:
            call, tables = getattr(problem, name)()
            answer = call()
        except Exception as error:  # a peer's compiler may fail in any way; ours may not
            if name == "kernel":
                raise
            why = (str(error).splitlines() or ["no message"])[0]
            notes.append(f"{label}: {name} left out, {type(error).__name__}: {why}")
            continue
        problem.difference(name, answer, problem.reference(tables))
        point[name] = round(quiet(f"{label}, {name}", call).min, 8)
    return point


def _copy_bandwidth(quiet, device):
    source = torch.zeros(COPY_BYTES if device != "cpu" else 2**16, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / quiet("copy", lambda: target.copy_(source)).min


def _fits(label, batch, context, dtype, heads, device, notes):
    """Whether the pool, two peers' copies and a gather fit into the free memory; notes what does not."""
    if device == "cpu":
        return True
    asked = 7 * batch * (context + FLEX_PAGE) * heads[1] * heads[2] * dtype.itemsize
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if asked > MEMORY_SHARE * free:
        notes.append(f"{label} left out: it takes {asked / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
    return asked <= MEMORY_SHARE * free


def _quiet(timer, disturbed, label, call):
    """Time a call, again while it is disturbed, at most ATTEMPTS times; notes one that stays so."""
    for _ in range(ATTEMPTS):
        timing = timer(call)
        print(f"{label}: {timing}", file=sys.stderr, flush=True)
        if not timing.disturbed:
            return timing
    disturbed.append(f"{label}: {timing.why}")
    return timing


def share(point, copy):
    """Part of the copy bandwidth (bytes a second) at which the kernel moved a point's bytes."""
    return point["bytes"] / point["kernel"] / copy


def table(run):
    """The run as text: one line a size, microseconds, share of the copy bandwidth, times of the peers."""
    r = run["results"]
    lines = [
        f"{run['machine'].get('gpu', run['machine']['cpu'])}: {r['shape']}",
        ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
        f"{r['statistic']}; a copy moves {r['copy'] / 1e9:,.0f} GB/s",
        "",
        "dtype      context  batch        MB   kernel µs  of copy  contiguous ÷ kernel  flex ÷ kernel",
    ]
    for p in r["points"]:
        peers = [f"{p[peer] / p['kernel']:.2f}" if peer in p else "-" for peer in ("contiguous", "flex")]
        lines.append(
            f"{p['dtype']:9}{p['context']:9,}{p['batch']:7}{p['bytes'] / 1e6:10,.1f}"
            f"{1e6 * p['kernel']:12,.1f}{share(p, r['copy']):9.0%}{peers[0]:>21}{peers[1]:>15}"
        )
    large = [share(p, r["copy"]) for p in r["points"] if p["batch"] * p["context"] >= LARGE]
    if large:
        verdict = "pass" if min(large) >= TARGET else "MISS"
        lines += ["", f"lowest share from {LARGE:,} tokens on: {min(large):.0%}  ≥ {TARGET:.0%} {verdict}"]
    lines += ["", *r["notes"]] if r["notes"] else []
    return "\n".join(lines + [f"disturbed: {line}" for line in r["disturbed"]])


def _name(dtype):
    return str(dtype).removeprefix("torch.")
