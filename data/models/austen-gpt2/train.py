"""Train austen-gpt2 and austen-gpt2-draft from six public-domain novels.

Run in three steps, in an environment with torch, numpy, safetensors and
tokenizers (the last one only to learn the vocabulary):

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr*.deb novels
    python train.py prepare --novels novels --work run
    python train.py train   --work run --model austen-gpt2 --steps 3000
    python train.py export  --work run --model austen-gpt2 --out .

`train` writes a checkpoint every few minutes and resumes from it, so that it
can be stopped at any moment. The model card, README.md, says what one run gave.
"""

import argparse
import base64
import hashlib
import json
import math
import platform
import re
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

END_OF_TEXT = "<|endoftext|>"
# GPT-2's own pre-tokenizer: contractions, words and numbers with their leading
# space, runs of punctuation, runs of white space.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
VOCAB_SIZE = 2048
CONTEXT = 1024
HELD_OUT_EVERY = 20  # chapters 7, 27, 47 … of each novel are never trained on

SHAPES = {
    "austen-gpt2": dict(n_layer=6, n_embd=256, n_head=4, n_inner=None),
    "austen-gpt2-draft": dict(n_layer=2, n_embd=128, n_head=2, n_inner=128),
}


# --- text ----------------------------------------------------------------------


def read_novels(novels):
    """The six novels as lists of lines, from the R package's data file.

    The file is a row of records: a 4-byte big-endian length, then a zlib stream
    of R serialization, which holds one vector of strings (type 0x10), each
    string behind 4 bytes of flags and a 4-byte length.
    """
    raw = next(Path(novels).rglob("data/Rdata.rdb")).read_bytes()
    books, at = [], 0
    while at < len(raw):
        stream = zlib.decompressobj()
        record = stream.decompress(raw[at + 4 :])
        at = len(raw) - len(stream.unused_data)
        start = record.index(b"\x00\x00\x00\x10\x00\x00") + 4
        (count,) = struct.unpack_from(">I", record, start)
        lines, here = [], start + 4
        for _ in range(count):
            (size,) = struct.unpack_from(">i", record, here + 4)
            here += 8
            lines.append(record[here : here + max(size, 0)].decode("utf-8"))
            here += max(size, 0)
        books.append(lines)
    return books


def chapters_of(lines):
    """One novel as a list of chapters, each a text with one paragraph a line."""
    text = "\n".join(lines).replace("\r", "")
    parts = re.split(r"\n(?=(?:VOLUME|CHAPTER|Chapter) [^\n]*\n)", "\n" + text)
    chapters = []
    for part in parts[1:]:
        paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", part)]
        # A heading ("CHAPTER II") is no prose, and an empty volume title neither.
        prose = [p for p in paragraphs if p and not re.match(r"(VOLUME|CHAPTER|FINIS|THE END)\b", p, re.I)]
        if sum(map(len, prose)) > 1000:
            chapters.append("\n\n".join(prose) + "\n")
    return chapters


def learn_vocabulary(chapters):
    """Byte-level BPE: {token bytes: rank}, bytes 0–255 first, then the merges."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    # ByteLevel writes each byte as a printable character; turn them back.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}
    by_rank = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[c] for c in token) for token, _ in by_rank]
    merged = [t for t in tokens if len(t) > 1]
    return {t: rank for rank, t in enumerate([bytes([b]) for b in range(256)] + merged)}


def encoding_from(folder):
    import tiktoken

    described = json.loads((folder / "encoding.json").read_text())
    ranks = {}
    for line in (folder / "vocabulary.tiktoken").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(
        name=described["name"],
        pat_str=described["pattern"],
        mergeable_ranks=ranks,
        special_tokens=described["special_tokens"],
    )


def prepare(args):
    """Split the text, learn the vocabulary, store the token ids."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = [], []
    for lines in read_novels(args.novels):
        for number, chapter in enumerate(chapters_of(lines)):
            (held_out if number % HELD_OUT_EVERY == 7 else train).append(chapter)
    ranks = learn_vocabulary(train)
    with open(work / "vocabulary.tiktoken", "wb") as file:
        for token, rank in ranks.items():
            file.write(base64.b64encode(token) + b" %d\n" % rank)
    described = {
        "name": "austen",
        "pattern": PATTERN,
        "special_tokens": {END_OF_TEXT: len(ranks)},
    }
    (work / "encoding.json").write_text(json.dumps(described, indent=2) + "\n")
    encoding = encoding_from(work)
    for name, chapters in [("train", train), ("held_out", held_out)]:
        # Each chapter begins with the end-of-text token, as in GPT-2's data.
        rows = [[encoding.eot_token] + encoding.encode_ordinary(c) for c in chapters]
        ids = np.concatenate([np.array(row, np.uint16) for row in rows])
        np.save(work / f"{name}.npy", ids)
        (work / f"{name}.txt").write_text("\n".join(chapters), newline="\n")
        chars = sum(map(len, chapters))
        print(f"{name}: {len(chapters)} chapters, {chars:,} characters, {len(ids):,} tokens")


# --- model: GPT-2 with Hugging Face's parameter names -----------------------------


class Conv1D(nn.Module):
    """A linear layer with its weight stored (in, out), as GPT-2 stores it."""

    def __init__(self, inputs, outputs, std):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * std)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Layer(nn.Module):
    def __init__(self, shape, dropout):
        super().__init__()
        width, inner = shape["n_embd"], shape["n_inner"] or 4 * shape["n_embd"]
        deep = 0.02 / math.sqrt(2 * shape["n_layer"])  # residual branches start smaller
        self.heads, self.dropout = shape["n_head"], dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": Conv1D(width, 3 * width, 0.02), "c_proj": Conv1D(width, width, deep)}
        )
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(width, inner, 0.02), "c_proj": Conv1D(inner, width, deep)})

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        out = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + F.dropout(self.attn["c_proj"](out), self.dropout, self.training)
        hidden = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + F.dropout(self.mlp["c_proj"](hidden), self.dropout, self.training)


class GPT2(nn.Module):
    def __init__(self, shape, dropout=0.0):
        super().__init__()
        self.wte = nn.Embedding(VOCAB_SIZE, shape["n_embd"])
        self.wpe = nn.Embedding(CONTEXT, shape["n_embd"])
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.h = nn.ModuleList([Layer(shape, dropout) for _ in range(shape["n_layer"])])
        self.ln_f = nn.LayerNorm(shape["n_embd"])
        self.dropout = dropout

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for layer in self.h:
            x = layer(x)
        return self.ln_f(x) @ self.wte.weight.T


# --- training ------------------------------------------------------------------------


def held_out_bits(model, work, windows=None):
    """Bits per character on the held-out chapters.

    Windows of 1,024 tokens that overlap by half; a token counts once, in the
    window where it has at least 512 tokens before it (except in the first).
    """
    ids = torch.from_numpy(np.load(work / "held_out.npy").astype(np.int64))
    characters = len((work / "held_out.txt").read_text())
    nats, counted, total = 0.0, 0, len(ids)
    starts = list(range(0, total - CONTEXT, CONTEXT // 2))[:windows]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for start in starts:
            window = ids[start : start + CONTEXT + 1]
            loss = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
            new = loss if start == 0 else loss[CONTEXT // 2 :]
            nats, counted = nats + new.sum().item(), counted + len(new)
    model.train(was_training)
    return nats / counted / math.log(2) * total / characters


def learning_rate(step, steps, peak):
    """Warm up for 100 steps, hold, then fall in a line to 0 over the last half."""
    return peak * min(1, (step + 1) / 100, 2 * (steps - step) / steps)


def optimizers_for(model, peak):
    """Muon for the matrices of the layers, AdamW for everything else."""
    matrices = [p for n, p in model.named_parameters() if n.startswith("h.") and p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if not (n.startswith("h.") and p.ndim == 2)]
    muon = torch.optim.Muon(matrices, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.95), weight_decay=0.01)]


def train(args):
    work = Path(args.work)
    checkpoint = work / f"{args.model}.pt"
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = GPT2(SHAPES[args.model], args.dropout)
    opts = optimizers_for(model, args.peak)
    ids = torch.from_numpy(np.load(work / "train.npy").astype(np.int64))
    step, seconds, curve = 0, 0.0, []
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for opt, state in zip(opts, saved["optimizers"], strict=True):
            opt.load_state_dict(state)
        step, seconds, curve = saved["step"], saved["seconds"], saved["curve"]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.model}: {parameters:,} parameters, step {step} of {args.steps}", flush=True)

    began = time.perf_counter()
    while step < args.steps:
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.peak)
        # Windows at random offsets, seeded by the step so that a resumed run
        # sees what an uninterrupted one would have seen.
        offsets = torch.randint(
            len(ids) - CONTEXT - 1, (args.batch,), generator=torch.Generator().manual_seed(step)
        )
        windows = torch.stack([ids[o : o + CONTEXT + 1] for o in offsets.tolist()])
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step += 1
        if step % args.every == 0 or step == args.steps:
            now = seconds + time.perf_counter() - began
            bits = held_out_bits(model, work, None if step == args.steps else 24)
            curve.append(
                dict(
                    step=step,
                    seconds=round(now, 1),
                    train_loss=round(loss.item(), 4),
                    bits_per_character=round(bits, 4),
                )
            )
            print(json.dumps(curve[-1]), flush=True)
            state = dict(
                model=model.state_dict(),
                optimizers=[o.state_dict() for o in opts],
                step=step,
                seconds=now,
                curve=curve,
            )
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)


def export(args):
    """Write the model folder: Hugging Face GPT-2 layout, float16 on disk."""
    from safetensors.torch import save_file

    work, out = Path(args.work), Path(args.out)
    saved = torch.load(work / f"{args.model}.pt", weights_only=True)
    shape = SHAPES[args.model]
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"transformer.{n}": t.half().contiguous() for n, t in saved["model"].items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        vocab_size=VOCAB_SIZE,
        n_positions=CONTEXT,
        **shape,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
        bos_token_id=VOCAB_SIZE - 1,
        eos_token_id=VOCAB_SIZE - 1,
    )
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ["encoding.json", "vocabulary.tiktoken"]:
        (out / name).write_bytes((work / name).read_bytes())
    # Score what was written, not what was in memory: float16 rounds the weights.
    model = GPT2(shape)
    model.load_state_dict({n: t.half().float() for n, t in saved["model"].items()})
    record = dict(
        model=args.model,
        parameters=sum(p.numel() for p in model.parameters()),
        steps=saved["step"],
        seconds=round(saved["seconds"]),
        held_out_bits_per_character=round(held_out_bits(model, work), 4),
        machine=f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        learning_curve=saved["curve"],
    )
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print({k: v for k, v in record.items() if k != "learning_curve"})
    for name in ["config.json", "encoding.json", "vocabulary.tiktoken", "model.safetensors"]:
        (out / name).chmod(0o644)
        content = (out / name).read_bytes()
        # For data/models/files.json, which loading checks each file against.
        print(json.dumps(dict(name=name, sha256=hashlib.sha256(content).hexdigest(), size=len(content))))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["prepare", "train", "export"])
    parser.add_argument("--work", required=True, help="folder for token ids and checkpoints")
    parser.add_argument("--novels", help="folder of the unpacked package (prepare)")
    parser.add_argument("--model", choices=list(SHAPES), default="austen-gpt2")
    parser.add_argument("--out", help="model folder to write (export)")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=4, help="windows of 1,024 tokens a step")
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    args = parser.parse_args()
    {"prepare": prepare, "train": train, "export": export}[args.command](args)


if __name__ == "__main__":
    main()
