"""Chapter 17, a kernel that follows the table: a pool with three texts, programs and loads, bytes, source.

Nothing here runs a model or looks at a clock.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from kvcourse import ops, sizing
from kvcourse.figures import template as look
from kvcourse.kernels import numpy_form

TEXTS = "ABC"
MOST_TOKENS = 128  # of a text in the panel
BLOCK_SIZES = [8, 16, 32]
ORDERS = ["shuffled", "in order"]
POOL_COLUMNS = 8  # blocks in a row of the pool's map

PALE = f"rgba(0, 114, 178, {look.CACHED_OPACITY})"  # cached rows, read again
# Gray on the bare page, so that it is seen in both themes.
HATCHED = {"shape": look.HATCH, "fgcolor": look.MASKED, "bgcolor": "rgba(0,0,0,0)", "solidity": 0.15}
CELL = 0.94  # of a column: length of a whole cell
LABELED = 0.7  # of a cell, filled from the left: its label lies on the filled part
CLEAR = "rgba(0,0,0,0)"
LEAST = 0.11  # of a cell in the pool's map: one token of 32 would be a line of one pixel
AXIS = {"showgrid": False, "ticks": "", "linewidth": 1}


# --- the pool --------------------------------------------------------------------------


def num_blocks(length, block_size):
    """Blocks that hold `length` tokens."""
    return -(-length // block_size)


def cells_of_pool(tables, lengths, block_size, total):
    """For each of `total` blocks its (label, tokens held, hover): label "B1" is text B's second block."""
    cells = [("", 0, f"block {block}: free") for block in range(total)]
    for name, table, length in zip(TEXTS, tables, lengths, strict=False):
        for place in range(num_blocks(length, block_size)):
            first, held = place * block_size, min(block_size, length - place * block_size)
            words = f"tokens {first} … {first + held - 1} of text {name}"
            cells[table[place]] = (f"{name}{place}", held, f"block {table[place]}: {words}")
    return cells


def pool_figure(tables, lengths, block_size, total):
    """The pool as rows of eight blocks, memory addresses from left to right."""
    rows = num_blocks(total, POOL_COLUMNS)
    figure = look.new_figure("", "", height=110 + 36 * rows, grid=False)
    _draw_pool(figure, cells_of_pool(tables, lengths, block_size, total), block_size)
    return figure


def pool_text(tables, lengths, block_size, total):
    """The sentence under it."""
    counts = [num_blocks(length, block_size) for length in lengths]
    unused = sum(counts) * block_size - sum(lengths)
    return (
        f"{_listed(lengths)} tokens lie in {_listed(counts)} blocks of {block_size}, {unused} slots in them "
        f"hold no token, and {total - sum(counts)} of the {total} blocks are free."
    )


def _draw_pool(figure, cells, block_size, **axes):
    held, rest = [], []
    for block, (label, tokens, hover) in enumerate(cells):
        x, y = block % POOL_COLUMNS, block // POOL_COLUMNS
        filled = max(tokens / block_size, LEAST) if tokens else 0
        if tokens:
            held.append((x, y, 0, filled, label, hover))
        if tokens < block_size:
            rest.append((x, y, filled, 1, "", f"{hover}; {block_size - tokens} slots unused"))
    figure.add_trace(_bars(held, "rows of tokens", {"color": PALE}, **axes))
    figure.add_trace(_bars(rest, "slots without a token", {"color": look.MASKED, "pattern": HATCHED}, **axes))
    figure.add_trace(_labels(held, **axes))
    rows = num_blocks(len(cells), POOL_COLUMNS)
    number = axes.get("xaxis", "x")[1:]
    figure.layout["xaxis" + number].update(
        **AXIS, range=[-0.6, POOL_COLUMNS - 0.4], dtick=1, title_text="block = row + column"
    )
    figure.layout["yaxis" + number].update(
        **AXIS,
        range=[rows - 0.4, -0.6],
        tickvals=list(range(rows)),
        ticktext=[f"{row * POOL_COLUMNS} +" for row in range(rows)],
        title_text="pool",
    )
    figure.update_layout(barmode="overlay")


def _bars(parts, name, marker, **more):
    """Parts (column, row, from, to, label, hover) of cells: from 0 to 1 is the whole cell."""
    return go.Bar(
        x=[round(CELL * (stop - start), 4) for _, _, start, stop, _, _ in parts],
        base=[round(x - CELL / 2 + CELL * start, 4) for x, _, start, _, _, _ in parts],
        y=[y for _, y, *_ in parts],
        hovertext=[hover for *_, hover in parts],
        name=name,
        marker=marker,
        width=0.88,
        orientation="h",
        hovertemplate="%{hovertext}<extra></extra>",
        **more,
    )


def _labels(parts, **more):
    """The labels in the middle of their cells, however short the part that is filled.

    On the hatch of an unused slot a label has the page's color behind it.
    """
    return go.Scatter(
        x=[x for x, *_ in parts],
        y=[y for _, y, *_ in parts],
        text=[label for *_, label, _ in parts],
        mode="markers+text",
        marker={
            "symbol": "square",
            "size": 20,
            "opacity": 1,
            "color": [look.PAPER if filled < LABELED else CLEAR for _, _, _, filled, *_ in parts],
        },
        textfont={"color": look.INK, "size": look.TEXT_SIZE},
        hoverinfo="skip",
        showlegend=False,
        **more,
    )


def _listed(numbers):
    words = [f"{n:,}" for n in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# --- bytes of K and V ------------------------------------------------------------------


def floor_bytes(lengths, num_kv_heads, head_dim, bytes_per_number=4):
    """K and V of all tokens, once."""
    return 2 * sum(lengths) * num_kv_heads * head_dim * bytes_per_number


def gather_bytes(lengths, block_size, num_kv_heads, head_dim, bytes_per_number=4):
    """Whole blocks read, whole blocks written, and the rows of the tokens read by attention."""
    copied = [num_blocks(length, block_size) * block_size for length in lengths]
    both = [2 * n + length for n, length in zip(copied, lengths, strict=True)]
    return floor_bytes(both, num_kv_heads, head_dim, bytes_per_number)


def partial_bytes(batch, num_heads, head_dim, splits):
    """Results of the splits, float32: an answer and a log-sum-exp each, written and read once more."""
    return 0 if splits == 1 else 2 * batch * num_heads * splits * (head_dim + 1) * 4


def splits_needed(batch, num_kv_heads, multiprocessors):
    """Smallest number of splits with which each multiprocessor gets a program, if all have work."""
    return -(-multiprocessors // (batch * num_kv_heads))


def splits_table(batches, num_kv_heads):
    """Splits that fill each device whose multiprocessors are published, one column for each batch."""
    lines = [f"{'':<32}{'multi-':>10}{'splits that give each a program, batch':>48}"]
    lines.append(f"{'':<32}{'processors':>10}" + "".join(f"{batch:>12}" for batch in batches))
    for device in sizing.devices().values():
        if device.multiprocessors is None:
            continue
        count, name = device.multiprocessors, device.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
        needed = "".join(f"{splits_needed(batch, num_kv_heads, count):>12}" for batch in batches)
        lines.append(f"{name:<32}{count:>10}{needed}")
    return "\n".join(lines)


# --- the main panel --------------------------------------------------------------------


def make_tables(lengths, block_size, order):
    """A table (3, most blocks), padded with −1, and the pool's number of blocks; its last one is free."""
    most = MOST_TOKENS // block_size
    total = len(lengths) * most + 1
    ids = np.arange(total - 1)
    if order == "shuffled":
        ids = np.random.default_rng(17).permutation(ids)
    tables, taken = np.full((len(lengths), most), -1, np.int32), 0
    for row, length in enumerate(lengths):
        count = num_blocks(length, block_size)
        tables[row, :count], taken = ids[taken : taken + count], taken + count
    return tables, total


def pools(rows, tables, lengths, block_size, total):
    """K and V (total, block_size, KV heads, head_dim) with the rows in their slots and NaN elsewhere.

    rows  for each text (K, V), each (KV heads, MOST_TOKENS or more, head_dim)
    """
    num_kv_heads, _, head_dim = rows[0][0].shape
    both = np.full((2, total, block_size, num_kv_heads, head_dim), np.nan, np.float32)
    for side, pool in enumerate(both):
        for text, table, length in zip(rows, tables, lengths, strict=True):
            position = np.arange(length)
            pool[table[position // block_size], position % block_size] = text[side][:, :length].swapaxes(0, 1)
    return both


def loads(splits, a, b, c, block_size, order, q, rows):
    """Attention of three texts over their blocks, program after program, and what it loads.

    a, b, c  tokens of the texts; q (3, heads, head_dim); rows as in `pools`
    `programs` has (text, split, [block ids in the order of loading]) of KV head 0; the others load the same.
    """
    lengths = [a, b, c]
    tables, total = make_tables(lengths, block_size, order)
    k, v = pools(rows, tables, lengths, block_size, total)
    seen = []
    out = numpy_form.paged_attention_numpy(q, k, v, tables, lengths, num_splits=splits, trace=seen)
    whole = [
        ops.attention(query[:, None], keys[:, :n], values[:, :n], start=n - 1)[:, 0]
        for query, (keys, values), n in zip(q, rows, lengths, strict=True)
    ]
    num_kv_heads, head_dim = k.shape[2:]
    floor = floor_bytes(lengths, num_kv_heads, head_dim)
    return {
        "splits": splits,
        "lengths": lengths,
        "block_size": block_size,
        "tables": tables.tolist(),
        "total": total,
        "num_kv_heads": num_kv_heads,
        "programs": [(text, split, blocks) for text, head, split, blocks in seen if head == 0],
        "padding": int((tables == -1).sum()),
        "with_work": sum(bool(blocks) for *_, blocks in seen),
        "floor": floor,
        "kernel": floor + partial_bytes(len(lengths), q.shape[1], head_dim, splits),
        "gather": gather_bytes(lengths, block_size, num_kv_heads, head_dim),
        "same": bool(np.abs(out - np.stack(whole)).max() < 1e-4),  # NaN would compare as False
    }


def loads_figure(data):
    """Left: a row for each program with work, its blocks in the order of loading. Right: the pool."""
    figure = look.new_figure("blocks, in the order of loading", "text and split", height=420, grid=False)
    size, working = data["block_size"], [program for program in data["programs"] if program[2]]
    whole, rest = [], []
    for row, (text, split, blocks) in enumerate(working):
        table, length = data["tables"][text], data["lengths"][text]
        for step, block in enumerate(blocks):
            held = min(size, length - table.index(block) * size)
            where = f"text {TEXTS[text]}, split {split}, load {step + 1}"
            hover = f"{where}: block {block}, {held} of {size} slots"
            whole.append((step, row, 0, held / size, str(block), hover))
            if held < size:
                rest.append((step, row, held / size, 1, "", f"{hover}; the others are masked"))
    figure.add_trace(_bars(whole, "loaded", {"color": PALE}, showlegend=False))
    masked = {"color": look.MASKED, "pattern": HATCHED}
    figure.add_trace(_bars(rest, "masked", masked, showlegend=False))
    figure.add_trace(_labels(whole))
    figure.update_layout(
        xaxis={"domain": [0, 0.58]},
        yaxis={},
        xaxis2={**look.axis_like(figure, "xaxis"), "domain": [0.68, 1], "anchor": "y2"},
        yaxis2={**look.axis_like(figure, "yaxis"), "anchor": "x2"},
    )
    cells = cells_of_pool(data["tables"], data["lengths"], size, data["total"])
    _draw_pool(figure, cells, size, xaxis="x2", yaxis="y2")
    columns = MOST_TOKENS // size
    figure.layout.xaxis.update(
        **AXIS,
        range=[-0.6, columns - 0.4],
        tickvals=list(range(columns)),
        ticktext=[str(step + 1) for step in range(columns)],
    )
    figure.layout.yaxis.update(
        **AXIS,
        range=[len(working) - 0.4, -0.6],
        tickvals=list(range(len(working))),
        ticktext=[f"{TEXTS[text]} · {split}" for text, split, _ in working],
    )
    return figure


def loads_text(data):
    """The sentence under the panel."""
    launched = len(data["programs"]) * data["num_kv_heads"]
    longest = max(len(blocks) for *_, blocks in data["programs"])
    floor, kernel, gather = (data[key] for key in ("floor", "kernel", "gather"))
    answers = "equal" if data["same"] else "differ from"
    count = data["padding"]
    padding = f", and −1, in {count} place{'s' * (count > 1)} of the tables, is never read" * bool(count)
    order = "each loads one block" if longest == 1 else f"the longest loads {longest} blocks in a row"
    splits = f"{data['splits']} split{'s' * (data['splits'] > 1)}"
    return (
        f"{data['with_work']} of {launched} programs ({data['num_kv_heads']} KV heads · "
        f"{len(data['lengths'])} texts · {splits}) have work, {order}, and they move "
        f"{kernel / floor:.2f} times the {floor / 1000:,.1f} kB of K and V, a gather "
        f"{gather / floor:.2f} times; the answers {answers} attention over contiguous rows{padding}."
    )


# --- the kernel's text -----------------------------------------------------------------


def kernel_source(name):
    """Source of a kernel of kvcourse/kernels/triton_decode.py: read as text, Triton need not be there."""
    folder = Path(find_spec("kvcourse.kernels").origin).parent
    text = (folder / "triton_decode.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min(decorator.lineno for decorator in node.decorator_list)
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise ValueError(f"triton_decode.py has no kernel {name!r}: it has _attend and _merge")


EXCERPT = {"sequence", "start", "stop", "table", "highest", "total", "mixed", "total_or_1", "to"}
EXCERPT |= {"length", "num_blocks", "tokens_per_split"}  # names of `_attend`


def kernel_excerpt():
    """What the page reads of the kernel `_attend`; "..." stands for lines left out.

    Shown are who the program is, its part of the context, the loop, and where the answer goes.
    """
    lines, shown, last = kernel_source("_attend").splitlines(), [], None
    for node in ast.parse("\n".join(lines)).body[0].body:
        if isinstance(node, ast.For) or _is_store(node) or _assigned(node) & EXCERPT:
            first = node.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            between = lines[last:first] if shown else []
            gap = ["    ..."] if any(between) else between
            shown, last = shown + gap + lines[first : node.end_lineno], node.end_lineno
    return "\n".join(shown)


def _assigned(node):
    """Names that a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def _is_store(node):
    return isinstance(node, ast.Expr) and "tl.store(" in ast.unparse(node)
