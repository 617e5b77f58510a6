"""`kvcourse bench kernel` without a GPU: answers, the recorded run and its table; no time is checked."""

import argparse
import json
import warnings
from types import SimpleNamespace

import pytest
import torch

from kvcourse import cli, kernels, measure
from kvcourse.bench import kernel

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none")


class OneMillisecond:
    """A timer whose every call takes 1 ms, and the copy too."""

    repeats = 4

    def __call__(self, fn):
        fn()
        return measure.Timing((1e-3,) * self.repeats, "")


@pytest.fixture(scope="module")
def stored(kernel_device):
    if kernel_device != "cpu":
        pytest.skip("Triton is compiled here: tiny shapes on a CPU need its interpreter")
    with warnings.catch_warnings():  # flex says once a process that it is slow when it is not compiled
        warnings.filterwarnings("ignore", message="flex_attention called without")
        run = kernel.time_everything(OneMillisecond(), "cpu", **kernel.TINY)
    return json.dumps(run | {"command": "kvcourse bench kernel"})


@pytest.fixture
def run(stored):
    return json.loads(stored)


def test_a_run_is_a_recorded_run(run, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(run), encoding="utf-8")
    read = measure.read_recorded(tmp_path / "one.json")
    assert read.kind == "kernel" and {"torch", "triton"} <= read.versions.keys()
    points = read.results["points"]
    asked = [(d, 40, b) for d in ("float32", "float16", "bfloat16") for b in (1, 3)]
    assert [(p["dtype"], p["context"], p["batch"]) for p in points] == asked
    assert all(p[way] == 1e-3 for p in points for way in ("kernel", "contiguous", "flex"))
    assert read.results["copy"] == 2 * 2**16 / 1e-3  # read and written
    assert read.results["notes"] == read.results["disturbed"] == []


def test_bytes_by_hand(run):
    """3 × 40 rows of 2 heads × 16, K and V; 3 × 3 table entries, 3 lengths; q and answer 3 × 4 × 16."""
    by_hand = {size: 2 * 3 * 40 * 2 * 16 * size + 4 * (9 + 3) + 2 * 3 * 4 * 16 * size for size in (2, 4)}
    for point in run["results"]["points"]:
        if point["batch"] == 3:
            assert point["bytes"] == by_hand[4 if point["dtype"] == "float32" else 2]


def test_the_table_shows_shares_and_the_aim(run):
    points = run["results"]["points"]
    text = kernel.table(run)
    assert "4 query heads over 2 KV heads" in text and "lowest share" not in text
    points[0] |= {"batch": 64, "context": 4096, "bytes": 75_000_000, "kernel": 1e-3, "flex": 2e-3}
    points[1] |= {"batch": 256, "context": 4096, "bytes": 69_000_000, "kernel": 1e-3}
    del points[0]["contiguous"]
    run["results"] |= {"copy": 1e11, "notes": ["a size left out"], "disturbed": ["one block"]}
    text = kernel.table(run)
    assert "lowest share from 262,144 tokens on: 69%  ≥ 70% MISS" in text
    assert "a size left out" in text and "disturbed: one block" in text and "a copy moves 100 GB/s" in text
    (line,) = [line for line in text.splitlines() if "75.0" in line]
    assert line.split() == ["float32", "4,096", "64", "75.0", "1,000.0", "75%", "-", "2.00"]
    points[1]["bytes"] = 70_100_000
    assert "≥ 70% pass" in kernel.table(run)


def test_a_wrong_answer_ends_the_bench(kernel_device, monkeypatch):
    real = kernels.paged_attention_decode
    monkeypatch.setattr(kernels, "paged_attention_decode", lambda *a, **k: 1.001 * real(*a, **k))
    problem = kernel.Problem(1, 40, torch.float32, kernel.TINY["heads"], kernel_device)
    with pytest.raises(ValueError, match="kernel, float32, batch 1, 40 tokens: .* not the same answer"):
        kernel.compared(problem)


def test_a_peer_that_fails_is_noted_and_ours_is_not(kernel_device, monkeypatch):
    def broken(self):
        raise RuntimeError("no compiler\nmore lines")

    monkeypatch.setattr(kernel.Problem, "flex", broken)
    notes, problem = [], kernel.Problem(1, 40, torch.float32, kernel.TINY["heads"], kernel_device)
    timer = OneMillisecond()
    point = kernel._point(problem, "one", lambda label, call: timer(call), notes)
    assert notes == ["one: flex left out, RuntimeError: no compiler"]
    assert point["kernel"] == point["contiguous"] == 1e-3 and "flex" not in point
    monkeypatch.setattr(kernel.Problem, "kernel", broken)
    with pytest.raises(RuntimeError, match="no compiler"):
        kernel._point(problem, "one", lambda label, call: timer(call), notes)


def test_a_block_that_stays_disturbed_is_named():
    timings = [measure.Timing((1.0,), "noise")] * 3 + [
        measure.Timing((1.0,), "noise"),
        measure.Timing((2.0,), ""),
    ]
    disturbed, calls = [], iter(timings)
    assert kernel._quiet(lambda call: next(calls), disturbed, "one", None).disturbed
    assert disturbed == ["one: noise"]
    assert kernel._quiet(lambda call: next(calls), disturbed, "two", None).min == 2.0
    assert disturbed == ["one: noise"]


def test_sizes_that_do_not_fit(monkeypatch):
    """256 × 4,096 tokens of 8 × 128 float16: K and V of 2.1 GB each, seven such arrays with the peers'."""
    notes, free = [], 14 * 2**30
    monkeypatch.setattr(
        kernel.torch, "cuda", SimpleNamespace(empty_cache=int, mem_get_info=lambda: (free, 0))
    )
    asked = ("large", 256, 4096, torch.float16, kernel.HEADS, "cuda", notes)
    assert not kernel._fits(*asked)
    assert notes == ["large left out: it takes 14.4 GiB, 14.0 GiB are free"]
    free = 20 * 2**30
    assert kernel._fits(*asked) and len(notes) == 1


# --- the command -------------------------------------------------------------------------


def test_without_a_gpu_one_line(monkeypatch, capsys):
    monkeypatch.setattr(kernel.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "available", lambda: True)
    assert cli.main(["bench", "kernel"]) == 1
    error = capsys.readouterr().err
    assert "needs a CUDA device" in error and "--interpret" in error and error.count("\n") == 1


def test_without_triton_one_line(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert cli.main(["bench", "kernel"]) == 1
    assert "needs Triton: on Linux `pip install -e '.[kernels]'`" in capsys.readouterr().err


def test_interpret_compares_and_times_nothing(kernel_device, monkeypatch, capsys):
    if kernel_device != "cpu":
        pytest.skip("Triton is compiled in this process: --interpret is a process of its own there")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(["bench", "kernel", "--interpret"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all("kernel" in line and "flex" in line for line in lines)
    assert cli.main(["bench", "kernel", "--interpret", "--out"]) == 1
    assert "leave one of them out" in capsys.readouterr().err


@needs_cuda
def test_the_timer_overwrites_the_cache_and_waits():
    timer = kernel.ColdTimer(5, 2**20)
    calls, ones = [], torch.zeros(2**20, device="cuda")
    timing = timer(lambda: calls.append(ones.add_(1)))
    assert len(timing.samples) == 5 and len(calls) == kernel.WARMUP + 5
    assert timing.min > 0 and timer.flush.eq(0).all()


def test_the_options(capsys):
    parser = argparse.ArgumentParser()
    kernel.add_arguments(parser)
    assert vars(parser.parse_args([])) == {"repeats": 30, "interpret": False, "out": None}
    with pytest.raises(SystemExit):
        parser.parse_args(["--repeats", "0"])
    assert "0 is too few" in capsys.readouterr().err
