"""What the model card promises, computed from the bundled files alone."""

import json
import math

import numpy as np

import kvcourse as kv

TEXT = (kv.paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
CARD = json.loads((kv.paths.data_dir() / "models" / "austen-gpt2" / "training.json").read_text())


def bits_per_character(model, ids, characters):
    """Bits for all tokens of `ids` after the first, over their characters."""
    logits = model(ids[:-1]).astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    nats = log_sum - logits[np.arange(len(ids) - 1), ids[1:]]
    return nats.sum() / math.log(2) / characters


def test_held_out_text_costs_at_most_two_bits_a_character():
    """Eight windows of up to 1,024 tokens, spread over the held-out chapters; the card scores them all."""
    model, tokenizer = kv.load_model("austen-gpt2"), kv.load_tokenizer("austen-gpt2")
    scores = []
    for start in np.linspace(0, len(TEXT) - 4000, 8).astype(int):
        piece = TEXT[start : start + 3000]
        ids = [tokenizer.eot_token, *tokenizer.encode(piece)][:1024]
        scores.append(bits_per_character(model, ids, len(tokenizer.decode(ids[1:]))))
    assert max(scores) < 2.2 and np.mean(scores) <= 2.0
    # The windows here see less text before each token than the card's, so they score a little worse.
    assert abs(np.mean(scores) - CARD["held_out_bits_per_character"]) < 0.15


def window_losses(model, windows):
    """Nats per token at each position, averaged over the windows: (length − 1,)."""
    rows = []
    for window in windows:
        logits = model(window[:-1]).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
        rows.append(log_sum - logits[np.arange(len(window) - 1), window[1:]])
    return np.mean(rows, axis=0)


def held_out_windows(count):
    ids = np.array(kv.load_tokenizer("austen-gpt2").encode(TEXT))
    return ids[: count * 1025].reshape(count, 1025)


def test_all_1024_positions_are_trained():
    """The position rows have grown from their random start, and the late ones do a work of their own.

    A fresh row has a norm of 0.02 · √256 = 0.32, a fresh run of 32 rows a mean norm of
    0.320 ± 0.003. With the rows of the first half in the place of the second, the loss of
    the second half must rise.
    """
    model = kv.load_model("austen-gpt2")
    table = model.params["wpe.weight"]
    assert np.linalg.norm(table, axis=1).reshape(-1, 32).mean(axis=1).min() > 0.38
    windows = held_out_windows(6)
    own = window_losses(model, windows)[512:]
    model.params["wpe.weight"] = np.concatenate([table[:512], table[:512]])
    assert window_losses(model, windows)[512:].mean() > own.mean() + 0.1


def test_late_positions_predict_no_worse_than_early_ones():
    mean = window_losses(kv.load_model("austen-gpt2"), held_out_windows(12))
    assert mean[768:].mean() < mean[64:256].mean() + 0.1
