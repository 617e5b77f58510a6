"""Another library reads the bundled folders as they are and computes the same logits."""

import numpy as np
import pytest
import torch
import transformers

import kvcourse as kv
from kvcourse import paths

# Both sides compute in float32 from the same weights, in other orders.
TOLERANCE = 1e-3


@pytest.mark.parametrize("name", ["austen-gpt2", "austen-gpt2-draft"])
def test_logits_agree_at_every_position(name):
    theirs = transformers.GPT2LMHeadModel.from_pretrained(
        paths.data_dir() / "models" / name, dtype=torch.float32
    )
    theirs.eval()
    ours = kv.load_model(name)
    ids = np.random.default_rng(0).integers(ours.config.vocab_size, size=1024)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(ours(ids), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "shape", [dict(n_embd=24, n_layer=2, n_head=3), dict(n_embd=32, n_layer=1, n_head=1, n_inner=40)]
)
def test_a_folder_that_transformers_wrote(shape, tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=77, n_positions=50, **shape)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = np.arange(50) % 77
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(kv.load_model(tmp_path)(ids), expected, rtol=0, atol=TOLERANCE)
