"""`kvcourse bench heads` on a tiny model: what it computes and keeps, never how well it trains."""

import argparse
import json
import math

import numpy as np
import pytest
import torch

import kvcourse as kv
from kvcourse import cli, measure, paths
from kvcourse.bench import heads
from kvcourse.models.grouped import GroupedGPT2

SHAPE = dict(
    num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, hidden_size=32, intermediate_size=64,
    vocab_size=50, max_seq_len=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return kv.random_model("gpt2", **SHAPE)


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(heads, "WINDOW", 8)
    monkeypatch.setattr(heads, "WARM_UP", 1)


def parameters(model):
    return {name: torch.tensor(array) for name, array in model.params.items()}


@pytest.mark.parametrize("kv_heads, how", heads.RUNS)
def test_the_pass_that_is_trained_is_the_numpy_model(tiny, kv_heads, how):
    model = GroupedGPT2(tiny, kv_heads, how)
    ids = np.random.default_rng(kv_heads).integers(50, size=(2, 9))
    found = heads.logits(parameters(model), model.config, torch.tensor(ids)).numpy()
    # Logits of size 1 in float32 (eps 1.2e-7), a few hundred additions in another order.
    np.testing.assert_allclose(found, [model(row) for row in ids], atol=2e-4, rtol=0)


def test_nats_of_a_window(tiny):
    window = torch.arange(9)[None]
    log_probs = kv.evaluation.next_token_log_probs(tiny(range(9)), range(9))
    (nats,) = heads.window_nats(parameters(tiny), tiny.config, window)
    assert nats == pytest.approx(-float(log_probs.sum()), abs=2e-3)  # kept to 3 decimals
    assert heads.bits_per_character([math.log(2) * 3, math.log(2) * 5], [2, 2]) == pytest.approx(2.0)


def test_a_run_trains_from_the_conversion_on_and_leaves_the_model_alone(tiny, small_windows):
    before = {name: array.copy() for name, array in tiny.params.items()}
    training = torch.arange(100) % 50
    windows = torch.stack([training[:9], training[20:29]])
    run = heads.one_run(tiny, 2, "first", training, windows, steps=30)
    assert (run["kv_heads"], run["pooling"]) == (2, "first")
    assert [point["step"] for point in run["curve"]] == [0, 15, 30]
    start = heads.window_nats(parameters(GroupedGPT2(tiny, 2, "first")), GroupedGPT2(tiny, 2).config, windows)
    assert run["curve"][0]["nats"] == start
    assert sum(run["curve"][2]["nats"]) < sum(start)  # 30 steps on a text that repeats itself
    assert all((tiny.params[name] == array).all() for name, array in before.items())
    again = heads.one_run(tiny, 2, "first", training, windows, steps=30)
    assert again["curve"][2]["nats"] == pytest.approx(run["curve"][2]["nats"], abs=0.05)
    assert heads.one_run(tiny, 4, "mean", training, windows, steps=1)["pooling"] == "none"


def test_a_recorded_run_can_be_read_and_names_no_folder(tiny, small_windows, tmp_path):
    training = torch.arange(60) % 50
    windows, characters = training[:9][None], [30]
    runs = [heads.one_run(tiny, n, how, training, windows, 1) for n, how in heads.RUNS]
    args = argparse.Namespace(novels="/a/folder", steps=1, threads=1)
    run = heads.recorded(runs, (windows, characters), len(training), args)
    (tmp_path / "heads.json").write_text(json.dumps(run), encoding="utf-8")
    read = measure.read_recorded(tmp_path / "heads.json")
    assert read.kind == "heads" and "/a/folder" not in json.dumps(run)
    assert read.results["characters"] == [30] and len(read.results["runs"]) == 5
    lines = heads.table(run).split("\n")
    assert lines[0].split() == ["KV", "heads", "pooling", "step", "0", "step", "1"] and len(lines) == 6
    want = runs[1]["curve"][0]["nats"][0] / math.log(2) / 30
    assert lines[2].split()[:3] == ["2", "mean", f"{want:.3f}"]


def test_the_held_out_windows_are_the_texts_beginning(tokenizer):
    windows, characters = heads.held_out_windows(tokenizer, count=3)
    text = (paths.data_dir() / "texts" / "austen-held-out.txt").read_text(encoding="utf-8")
    assert windows.shape == (3, 513)
    assert windows[0, -1] == windows[1, 0]  # a token that no window predicts is the next one's first
    told = tokenizer.decode([int(windows[0, 0]), *windows[:, 1:].flatten().tolist()])
    assert text.startswith(told)
    assert sum(characters) == len(told) - len(tokenizer.decode([int(windows[0, 0])]))


def test_novels_that_are_not_there_are_refused_in_one_line(tokenizer, tmp_path, capsys):
    with pytest.raises(cli.CommandError, match="no data/Rdata.rdb in it: unpack r-cran-janeaustenr there"):
        heads.training_ids(tmp_path, tokenizer)
    assert cli.main(["bench", "heads", "--novels", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_other_novels_are_refused(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "Rdata.rdb").write_bytes(b"")
    script = heads._train_script()
    script.read_novels = lambda folder: [["CHAPTER I", "", "It is a truth."]]
    monkeypatch.setattr(heads, "_train_script", lambda: script)
    with pytest.raises(cli.CommandError, match="held-out chapters are not data/texts"):
        heads.training_ids(tmp_path, tokenizer)
