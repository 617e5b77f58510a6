"""Pools the KV heads of austen-gpt2 and trains a little further: loss on held-out text before and after.

Five runs with the same batches: all 4 heads (the control), 2 and 1 KV heads made by the mean of each
group or by its first head. Nothing is timed. The training text is what the model was trained on, six
novels, which the repository does not hold; data/models/austen-gpt2/train.py says how to get them:

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr*.deb novels
    kvcourse bench heads --novels novels --out

Source: Ainslie et al. 2023 (arXiv 2305.13245), section 2.1, "uptraining".
"""

import importlib.util
import math
import platform
from pathlib import Path

import torch
from torch.nn import functional as F

from kvcourse import loading, measure, paths
from kvcourse.bench import numpy_gpt2
from kvcourse.cli import CommandError
from kvcourse.models.grouped import GroupedGPT2

KIND = "heads"
RUNS = ((4, "mean"), (2, "mean"), (2, "first"), (1, "mean"), (1, "first"))  # the mean of 1 head: the control
WINDOW, BATCH = 512, 4  # tokens in a window; windows in a training step
HELD_OUT_WINDOWS = 24  # from the start of the held-out text, without overlap
LEARNING_RATE = 1e-4  # at 3e-4 the control itself gets worse
WARM_UP = 10  # steps


def add_arguments(parser):
    """The options of `kvcourse bench heads`."""
    parser.add_argument("--novels", required=True, help="folder of the unpacked package with the six novels")
    parser.add_argument(
        "--steps", type=numpy_gpt2.count, default=120, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=numpy_gpt2.count, default=1, help="of PyTorch (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        nargs="?",
        const="",
        metavar="FILE",
        help="keep the run as a JSON file (default: data/measurements/heads-<processor>.json)",
    )


def main(args):
    """Train the five models, print the table, keep the run where --out asks.

    Raises CommandError when --out cannot be written (before training), and when the novels are not there or
    are not those whose held-out chapters the repository holds.
    """
    if args.out is not None:
        numpy_gpt2.check_writable(Path(args.out) if args.out else numpy_gpt2.default_path("check", KIND))
    torch.set_num_threads(args.threads)
    model, tokenizer = loading.load_model("austen-gpt2"), loading.load_tokenizer("austen-gpt2")
    training = training_ids(args.novels, tokenizer)
    held_out = held_out_windows(tokenizer)
    runs = [
        _announced(one_run(model, kv_heads, how, training, held_out[0], args.steps)) for kv_heads, how in RUNS
    ]
    run = recorded(runs, held_out, len(training), args)
    print(table(run))
    path = Path(args.out) if args.out else numpy_gpt2.default_path(run["machine"]["cpu"], KIND)
    numpy_gpt2.keep(run, path, asked=args.out is not None)


def recorded(runs, held_out, training_tokens, args):
    """The recorded run as a dict. `results` holds "characters", those of each held-out window, and "runs", a
    list of {kv_heads, pooling, curve: [{step, nats: of each window}]}."""
    windows, characters = held_out
    described = measure.describe_machine()
    machine = {name: described[name] for name in ("cpu", "cores", "os")}
    machine["threads"] = torch.get_num_threads()
    return {
        "kind": KIND,
        "command": f"kvcourse bench {KIND} --novels novels --steps {args.steps} --threads {args.threads}",
        "date": described["date"],
        "machine": machine,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "results": {
            "model": "austen-gpt2",
            "training_text": "the chapters of six novels by Jane Austen (r-cran-janeaustenr) that "
            "austen-gpt2 was trained on; the held-out chapters are not among them",
            "training_tokens": training_tokens,
            "steps": args.steps,
            "tokens_per_step": BATCH * WINDOW,
            "optimizer": f"AdamW, {LEARNING_RATE:g}, batches seeded by the step",
            "window": WINDOW,
            "characters": characters,
            "runs": runs,
            "disturbed": [],
        },
    }


def table(run):
    """The run as text: bits per character at each step that was measured, a line a run."""
    r = run["results"]
    steps = [point["step"] for point in r["runs"][0]["curve"]]
    lines = ["KV heads  pooling " + "".join(f"{f'step {step}':>10}" for step in steps)]
    for one in r["runs"]:
        bits = [bits_per_character(point["nats"], r["characters"]) for point in one["curve"]]
        lines.append(f"{one['kv_heads']:>8}  {one['pooling']:8}" + "".join(f"{b:>10.3f}" for b in bits))
    return "\n".join(lines)


def bits_per_character(nats, characters):
    """Bits of all windows divided by their characters."""
    return sum(nats) / math.log(2) / sum(characters)


# --- the texts ----------------------------------------------------------------------


def training_ids(novels, tokenizer):
    """Token ids of all chapters that are not held out, as train.py prepares them: an int64 tensor."""
    train = _train_script()
    if not any(Path(novels).rglob("data/Rdata.rdb")):
        raise CommandError(f"--novels {novels}: no data/Rdata.rdb in it: unpack r-cran-janeaustenr there")
    trained, held_out = [], []
    for lines in train.read_novels(novels):
        for number, chapter in enumerate(train.chapters_of(lines)):
            (held_out if number % train.HELD_OUT_EVERY == 7 else trained).append(chapter)
    if "\n".join(held_out) != _held_out_text():
        raise CommandError(
            f"--novels {novels}: its held-out chapters are not data/texts/austen-held-out.txt, so what was "
            f"not trained on is not known: use the package's version that train.py names"
        )
    rows = [[tokenizer.eot_token, *tokenizer.encode_ordinary(chapter)] for chapter in trained]
    return torch.tensor([token for row in rows for token in row])


def held_out_windows(tokenizer, count=HELD_OUT_WINDOWS):
    """The first windows of the held-out text: ids (count, WINDOW + 1), and the characters of each one's
    predicted tokens, 1 … WINDOW."""
    ids = tokenizer.encode_ordinary(_held_out_text())
    windows = [ids[start : start + WINDOW + 1] for start in range(0, count * WINDOW, WINDOW)]
    return torch.tensor(windows), [len(tokenizer.decode(window[1:])) for window in windows]


def _held_out_text():
    return (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")


def _train_script():
    """data/models/austen-gpt2/train.py as a module: its reading of the novels is the model's own."""
    path = paths.data_dir() / "models" / "austen-gpt2" / "train.py"
    spec = importlib.util.spec_from_file_location("austen_train", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the training --------------------------------------------------------------------


def one_run(model, kv_heads, how, training, windows, steps):
    """Pool, measure, train, measure: {kv_heads, pooling, curve}."""
    grouped = GroupedGPT2(model, kv_heads, how)
    p = {name: torch.tensor(array, requires_grad=True) for name, array in grouped.params.items()}
    optimizer = torch.optim.AdamW(p.values(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    curve = [{"step": 0, "nats": window_nats(p, grouped.config, windows)}]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP, 2 * (steps - step) / steps)
        seeded = torch.Generator().manual_seed(step)  # all runs see the same batches
        starts = torch.randint(len(training) - WINDOW, (BATCH,), generator=seeded)
        batch = torch.stack([training[start : start + WINDOW + 1] for start in starts.tolist()])
        F.cross_entropy(
            logits(p, grouped.config, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        ).backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (max(steps // 2, 1), steps):
            curve.append({"step": step + 1, "nats": window_nats(p, grouped.config, windows)})
    pooling = "none" if kv_heads == model.config.num_heads else how
    return {"kv_heads": kv_heads, "pooling": pooling, "curve": curve}


def logits(p, config, ids):
    """The pass of a GPT-2 with grouped heads, differentiable: ids (B, T) → (B, T, vocab_size)."""
    B, T = ids.shape
    widths = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    x = p["wte.weight"][ids] + p["wpe.weight"][:T]  # (B, T, d)

    def linear(x, name):
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], config.norm_eps)

    for layer in range(config.num_layers):
        qkv = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").split(widths, dim=-1)
        q, k, v = (t.view(B, T, -1, config.head_dim).transpose(1, 2) for t in qkv)  # (B, heads, T, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + linear(out.transpose(1, 2).flatten(2), f"h.{layer}.attn.c_proj")
        h = F.gelu(linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc"), approximate="tanh")
        x = x + linear(h, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ p["wte.weight"].T


@torch.no_grad()
def window_nats(p, config, windows):
    """−Σ ln p of the predicted tokens of each window, rounded to 3 decimals."""
    found = []
    for window in windows:
        predicted = logits(p, config, window[None, :-1])[0]
        found.append(round(F.cross_entropy(predicted, window[1:], reduction="sum").item(), 3))
    return found


def _announced(run):
    """Training takes minutes: say what is done."""
    print(f"{run['kv_heads']} KV heads, {run['pooling']}: trained", flush=True)
    return run
