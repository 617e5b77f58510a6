"""`kvcourse bench torch` at a tiny shape. What it prints is checked, how fast this machine is never."""

import argparse
import json
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcourse import cli, loading, measure, paths
from kvcourse.bench import numpy_gpt2, torch_gpt2, transformers_gpt2
from kvcourse.bench.replay import TorchStepProducts
from kvcourse.torch_models import GPT2, BatchCache, MemoryCap, ProfiledLaunches, event_seconds

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, there is none")


def make_quiet(patch):
    """A machine on which nothing disturbs and every call takes one unit, 10 ms, of a fake clock."""
    now = iter(range(10**9))
    patch.setattr(measure, "_clock", lambda: next(now) * 0.01)
    patch.setattr(measure, "_threads_waiting", lambda: "")
    patch.setattr(measure._Crowd, "why", lambda self: "")
    patch.setattr(torch_gpt2, "PAUSE_SECONDS", 0)


@pytest.fixture
def quiet(monkeypatch):
    make_quiet(monkeypatch)


@pytest.fixture(scope="module")
def timed_once():
    with pytest.MonkeyPatch.context() as patch:
        make_quiet(patch)
        timed = torch_gpt2.time_everything(quick=True, repeats=7, device="cpu", peer=False)
    return json.dumps(timed | {"command": "kvcourse bench torch"})


@pytest.fixture
def run(timed_once):
    return json.loads(timed_once)


def options(*words):
    parser = argparse.ArgumentParser()
    torch_gpt2.add_arguments(parser)
    return parser.parse_args(words)


# --- the run --------------------------------------------------------------------------


def test_a_run_is_a_recorded_run(run, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(run), encoding="utf-8")
    read = measure.read_recorded(tmp_path / "one.json")
    assert read.kind == "torch" and read.versions["torch"] == torch.__version__
    results = read.results
    asked = [(d, c, b) for d in torch_gpt2.DTYPES["cpu"] for c in (16, 48) for b in (1, 2, 8)]
    assert [(p["dtype"], p["context"], p["batch"]) for p in results["points"]] == asked
    assert {p["mode"] for p in results["points"]} == {"eager"}  # a graph needs a GPU
    assert {p["seconds"] for p in results["points"]} == {p["products"] for p in results["points"]} == {0.01}
    assert results["disturbed"] == [] and results["peer"] == {}
    assert results["ratios"] == {
        "batch 8 at 16 ÷ its matrix products": 1.0,
        "tokens a second, batch 8 ÷ batch 1": 8.0,
    }


def test_the_bytes_of_a_point_are_those_a_step_reads(run):
    """Tiny shape by hand: 2 layers, 2 heads of 16, so 128 numbers a token; all weights but the positions."""
    shape = loading.random_model("gpt2", **numpy_gpt2.QUICK_SHAPE).config
    weights = shape.num_parameters - 64 * 32
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        found = torch_gpt2.point(run["results"], dtype, 48, 8)
        assert found["cache_bytes"] == size * 8 * 49 * 128  # the new token's row is read too
        assert found["weights_bytes"] == size * weights
    assert torch_gpt2.point(run["results"], "float32", 48, 3) is None
    assert torch_gpt2.point(run["results"], "float32", 48, 8, "graph") is None


def test_the_run_shows_that_answers_agree_and_memory_comes_back(run):
    results = run["results"]
    for dtype, found in results["answers"].items():
        assert found.keys() == {"tolerance", "NumPy", "single runs"}
        assert found["tolerance"] == torch_gpt2.TOLERANCE[dtype] >= max(found["NumPy"], found["single runs"])
    assert results["answers"]["float16"]["NumPy"] > 0
    memory = results["out_of_memory"]
    assert memory["after_bytes"] == [memory["baseline_bytes"]] * 5
    assert memory["limit_bytes"] == 5 * 48 * 128 * 4 // 2  # two and a half caches of 48 tokens
    assert results["launches"] == {"counted": 12 * 2 + 6}


def test_another_answer_ends_the_run(quiet, monkeypatch):
    bench = torch_gpt2._Bench("cpu", quick=True, repeats=1, attempts=1)
    logits = np.ones((1, 2, 3), np.float32)
    bench._compare("float32", logits, {"NumPy": logits + np.float32(1e-6)})
    with pytest.raises(ValueError, match="float32: a batch and graph differ by 0.01 of the largest logit"):
        bench._compare("float32", logits, {"NumPy": logits, "graph": logits * np.float32(0.99)})
    with pytest.raises(ValueError, match="differ by nan"):
        bench._compare("float32", logits * np.float32("nan"), {"NumPy": logits})


def test_memory_that_does_not_come_back_ends_the_run(quiet, monkeypatch):
    bench = torch_gpt2._Bench("cpu", quick=True, repeats=1, attempts=1)
    leaked = []
    monkeypatch.setattr(
        torch_gpt2, "_run_out", lambda allocate, held: leaked.append(torch.zeros(1, dtype=torch.uint8))
    )
    with pytest.raises(ValueError, match=r"after out-of-memory \[1, 2, 3, 4, 5\] bytes were held, 0 before"):
        bench.out_of_memory()


def test_a_disturbed_block_is_timed_again_and_named_when_it_stays_so(quiet, monkeypatch):
    bench = torch_gpt2._Bench("cpu", quick=True, repeats=2, attempts=3)
    answers = iter(["busy", "busy", ""])
    monkeypatch.setattr(measure, "_threads_waiting", lambda: next(answers))
    assert bench._quiet("a step", lambda: None).min == pytest.approx(0.01) and bench.disturbed == []
    monkeypatch.setattr(measure, "_threads_waiting", lambda: "busy")
    bench._quiet("a step", lambda: None)
    assert bench.disturbed == ["a step: busy"]


def test_caches_that_do_not_fit_are_left_out_with_one_line(quiet, monkeypatch):
    bench = torch_gpt2._Bench("cpu", quick=True, repeats=1, attempts=1)
    bench.dtypes, bench.contexts = ("float16",), (48,)
    monkeypatch.setattr(torch_gpt2, "_free_bytes", lambda device: 60_000)  # 56 rows: 14,336 B a sequence
    bench.sweep()
    assert [p["batch"] for p in bench.points] == [1, 2]
    assert bench.notes == ["float16, 48 tokens, batch 8 left out: 0.0 GiB of caches do not fit"]
    net = GPT2(bench.model, dtype="float16")
    assert not bench._fits(net, 512, 128) and len(bench.notes) == 1  # on a CPU: too slow to be asked for


def test_the_peer_gives_the_same_logits_and_is_timed(quiet):
    bench = torch_gpt2._Bench("cpu", quick=True, repeats=1, attempts=1)
    bench.transformers()
    assert bench.peer == {
        "dtype": "float32", "context": 16, "batch": 8, "ours": 0.01, "dynamic": 0.01, "static": 0.01,
    }  # fmt: skip
    assert [note.partition(":")[0] for note in bench.notes] == [
        "transformers, dynamic cache",
        "transformers, static cache",
    ]


def test_a_peer_with_other_weights_is_no_peer(quiet, monkeypatch):
    bench = torch_gpt2._Bench("cpu", quick=True, repeats=1, attempts=1)
    other = loading.random_model("gpt2", seed=1, **numpy_gpt2.QUICK_SHAPE)
    peer = transformers_gpt2.TransformersGPT2(other, None)
    monkeypatch.setattr(transformers_gpt2, "TransformersGPT2", lambda *args: peer)
    with pytest.raises(ValueError, match="not the same work"):
        bench.transformers()


def test_without_transformers_the_peer_is_left_out_with_one_line(quiet, monkeypatch):
    monkeypatch.setattr(transformers_gpt2, "find_spec", lambda name: None)
    bench = torch_gpt2._Bench("cpu", quick=True, repeats=1, attempts=1)
    bench.transformers()
    assert bench.peer == {} and bench.notes == [
        "transformers left out: not installed (requirements-test.lock has it)"
    ]


# --- what is timed ----------------------------------------------------------------------


class Multiplied(TorchDispatchMode):
    """Notes the shapes of every matrix product, and which tensors' memory they read."""

    def __enter__(self):
        self.products = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm"):
            left, right = args[-2:]
            self.products.append((tuple(left.shape), tuple(right.shape), right.untyped_storage().data_ptr()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_replay_makes_every_product_of_a_step(batch):
    """Shapes and right-hand tensors of a step and of the replay, in order: the same list."""
    net = GPT2(loading.random_model("gpt2", **numpy_gpt2.QUICK_SHAPE))
    cache = BatchCache(net, batch, 20)
    cache.fill_random(10)
    replay = TorchStepProducts(net, cache)
    with Multiplied() as of_replay:
        replay()
    with Multiplied() as of_step:
        net.decode([1] * batch, cache, attention="written")
    assert len(of_step.products) == 6 * 2 + 1
    assert of_replay.products == of_step.products


def test_each_timed_call_finds_the_same_tokens():
    net = GPT2(loading.random_model("gpt2", **numpy_gpt2.QUICK_SHAPE))
    cache = BatchCache(net, 2, 20)
    cache.fill_random(10)
    call = torch_gpt2._at(cache, 10, lambda: net.decode([1, 2], cache))
    first = call().clone()
    assert torch.equal(call(), first) and cache.longest == 10


def test_the_branches_for_a_gpu_without_one(quiet, monkeypatch):
    """The Python side of a CUDA run: the CPU computes, a plain step stands for the graph."""
    on_cpu = torch_gpt2.GPT2
    monkeypatch.setattr(torch_gpt2, "GPT2", lambda model, device, dtype: on_cpu(model, "cpu", dtype))
    monkeypatch.setattr(
        torch_gpt2, "GraphedDecode", lambda net, cache: lambda tokens: net.decode(tokens, cache).clone()
    )
    monkeypatch.setattr(
        torch_gpt2, "event_seconds", lambda call, repeats, device: event_seconds(call, repeats, device="cpu")
    )
    monkeypatch.setattr(torch_gpt2, "MemoryCap", lambda limit, device: MemoryCap(limit, "cpu"))
    monkeypatch.setattr(
        torch_gpt2, "profiled_launches", lambda call: call() is None or ProfiledLaunches(9, 5)
    )
    for name, value in {
        "empty_cache": None, "mem_get_info": (2**33, 2**34), "memory_reserved": 0,
        "get_device_properties": SimpleNamespace(name="NVIDIA Imagined 3000", total_memory=2**34),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    timed = torch_gpt2.time_everything(quick=True, repeats=1, device="cuda", peer=False)
    results = timed["results"]
    assert results["device"] == timed["machine"]["gpu"] == "NVIDIA Imagined 3000"
    assert results["dtypes"] == ["float16", "bfloat16", "float32"]
    modes = [p["mode"] for p in results["points"]]
    assert modes == ["eager", "graph"] * 18
    counts = {"kernels": 9, "calls": 5}
    assert results["launches"] == {"counted": 30, "eager": counts, "graph": counts}
    assert results["answers"]["float16"].keys() == {"tolerance", "NumPy", "single runs", "graph"}
    assert results["ratios"]["batch 1 at 16, eager ÷ graph"] == 1.0
    assert re.search(r"^ +1 +10\.00 +10\.00 +10\.00 +100 ", torch_gpt2.table(timed), re.M)


@needs_cuda
def test_the_whole_run_on_a_gpu(monkeypatch):
    timed = torch_gpt2.time_everything(quick=True, repeats=2, device="cuda", peer=True)
    results = timed["results"]
    assert {p["mode"] for p in results["points"]} == {"eager", "graph"}
    assert results["launches"]["graph"]["calls"] < results["launches"]["eager"]["calls"]
    assert results["out_of_memory"]["after_bytes"] == [results["out_of_memory"]["baseline_bytes"]] * 5
    assert results["answers"]["float16"]["graph"] <= torch_gpt2.TOLERANCE["float16"]
    assert timed["machine"]["gpu"] in torch_gpt2.table(timed)


# --- what is printed and kept --------------------------------------------------------------


def test_the_table_shows_every_point_and_marks_limits(run):
    results = run["results"]
    for p in results["points"]:
        p["products"] = 0.005
    results["points"].append({**results["points"][0], "mode": "graph", "seconds": 0.001})
    results["peer"] = {"ours": 0.01, "dynamic": 0.009, "static": 0.02}
    text = torch_gpt2.table(run)
    assert re.search(
        r"^ +1 +10\.00 +1\.00 +5\.00 +1,000 +0\.1 +0\.0$", text, re.M
    )  # the first, with its graph
    assert len(re.findall(r"^ +8 +10\.00 +5\.00 +800 ", text, re.M)) == 6  # three dtypes, two contexts
    assert re.search(r"batch 8 at 16 ÷ transformers, default cache +1\.11 +≤ 1 +MISS$", text, re.M)
    assert re.search(r"batch 8 at 16 ÷ transformers, static cache +0\.50$", text, re.M)
    assert re.search(r"batch 1 at 16, eager ÷ graph +10\.00$", text, re.M)
    results["peer"]["dynamic"] = 0.0125
    assert re.search(r"default cache +0\.80 +≤ 1 +pass$", torch_gpt2.table(run), re.M)


@pytest.fixture
def no_process(run, monkeypatch):
    monkeypatch.setattr(torch_gpt2, "_run_in_own_process", lambda args: run)
    return run


def test_without_out_nothing_is_written(no_process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path)
    torch_gpt2.main(options("--quick"))
    assert "Not kept. With --out it would be written to" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_out_keeps_the_run_under_the_name_of_what_computed(no_process, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path)
    no_process["machine"]["cpu"] = "Intel(R) Xeon(R) Processor"
    torch_gpt2.main(options("--out"))
    no_process["machine"]["gpu"] = "NVIDIA GeForce RTX 3060 Laptop GPU"
    torch_gpt2.main(options("--out"))
    names = [path.name for path in sorted((tmp_path / "measurements").iterdir())]
    assert names == ["torch-intel-xeon.json", "torch-nvidia-geforce-rtx-3060-laptop-gpu.json"]
    assert measure.read_recorded(tmp_path / "measurements" / names[1]).results == no_process["results"]


def test_a_disturbed_run_is_shown_but_not_kept(no_process, tmp_path, capsys):
    no_process["results"]["disturbed"] = ["batch 8, ours: busy"]
    with pytest.raises(cli.CommandError, match="not kept, the run was disturbed .batch 8, ours: busy."):
        torch_gpt2.main(options("--out", str(tmp_path / "kept.json")))
    assert not (tmp_path / "kept.json").exists()
    assert "disturbed: batch 8, ours: busy" in capsys.readouterr().out


def test_the_command_runs_its_own_process(capfd):
    """The whole way once: command, process, JSON, table. One thread: other work slows that least."""
    words = ["bench", "torch", "--quick", "--device", "cpu", "--no-transformers", "--threads", "1"]
    assert cli.main(words) == 0
    out = capfd.readouterr().out
    assert out.startswith("a tiny GPT-2") and ", 1 thread\n" in out


def test_a_failed_timing_process_is_one_line(monkeypatch, capfd):
    failed = subprocess.CompletedProcess([], returncode=1, stdout=b"")
    monkeypatch.setattr(torch_gpt2.subprocess, "run", lambda *args, **kwargs: failed)
    assert cli.main(["bench", "torch", "--quick"]) == 1
    assert capfd.readouterr().err == (
        "kvcourse: the timing process ended with status 1, its own words are above\n"
    )


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "torch", "--device", "cuda"]) == 1
    assert capfd.readouterr().err == (
        "kvcourse: --device cuda: PyTorch finds no CUDA device here, use --device cpu\n"
    )
