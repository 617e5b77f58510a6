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


def test_all_1024_positions_are_trained():
    """An untrained position keeps its random start, as unlike its neighbor as noise is."""
    table = kv.load_model("austen-gpt2").params["wpe.weight"].astype(np.float64)
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    neighbors = (unit[1:] * unit[:-1]).sum(1)
    # Two random directions in 256 dimensions have a cosine of 0 ± 0.06.
    assert neighbors[-200:].min() > 0.3


def test_late_positions_predict_no_worse_than_early_ones():
    model, tokenizer = kv.load_model("austen-gpt2"), kv.load_tokenizer("austen-gpt2")
    ids = np.array(tokenizer.encode(TEXT[:200_000]))
    windows = ids[: len(ids) // 1024 * 1024].reshape(-1, 1024)[:12]
    losses = []
    for window in windows:
        logits = model(window[:-1]).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        losses.append(np.log(np.exp(logits - top).sum(-1)) + top[:, 0] - logits[np.arange(1023), window[1:]])
    mean = np.mean(losses, axis=0)
    assert mean[768:].mean() < mean[64:256].mean() + 0.1
