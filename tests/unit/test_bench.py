"""`kvcourse bench numpy` at a tiny shape. What it prints is checked, how fast this machine is never."""

import argparse
import errno
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvcourse import cli, loading, measure, paths
from kvcourse.bench import chapter_code, numpy_gpt2, torch_gpt2, transformers_gpt2
from kvcourse.bench.replay import step_products
from kvcourse.caches import ContiguousCache


def tiny_model(name="gpt2", **changes):
    return loading.random_model(name, **(numpy_gpt2.QUICK_SHAPE | changes))


@pytest.fixture
def quiet(monkeypatch):
    """A machine on which nothing disturbs and every call takes one unit, 10 ms, of a fake clock."""
    now = iter(range(10**9))
    monkeypatch.setattr(measure, "_clock", lambda: next(now) * 0.01)
    monkeypatch.setattr(measure, "_threads_waiting", lambda: "")
    monkeypatch.setattr(measure._Crowd, "why", lambda self: "")
    monkeypatch.setattr(numpy_gpt2, "PAUSE_SECONDS", 0)


@pytest.fixture
def run(quiet):
    return numpy_gpt2.time_everything(quick=True, repeats=7, peer=False) | {"command": "kvcourse bench numpy"}


def options(*words):
    parser = argparse.ArgumentParser()
    numpy_gpt2.add_arguments(parser)
    return parser.parse_args(words)


# --- the run --------------------------------------------------------------------------


def test_a_run_is_a_recorded_run(run, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(run), encoding="utf-8")
    read = measure.read_recorded(tmp_path / "one.json")
    assert read.kind == "numpy"
    results = read.results
    assert results["lengths"] == list(numpy_gpt2.QUICK_LENGTHS)
    assert results["seconds"]["cached"] == results["seconds"]["uncached"] == [0.01] * 5
    assert results["seconds"]["products"] == [None] * 4 + [0.01]
    assert results["ratios"]["cached step at 60 ÷ at 4"] == 1.0
    assert results["disturbed"] == []


def test_a_disturbed_block_is_timed_again_and_named_when_it_stays_so(quiet, monkeypatch):
    bench = numpy_gpt2._Bench(tiny_model(), (4, 8), repeats=2, attempts=3)
    answers = iter(["busy", "busy", ""])
    monkeypatch.setattr(measure, "_threads_waiting", lambda: next(answers))
    bench._time("cached", 0, lambda: None)
    assert bench.disturbed == [] and bench.seconds == {"cached": [0.01, None]}
    monkeypatch.setattr(measure, "_threads_waiting", lambda: "busy")
    bench._time("cached", 1, lambda: None)
    assert bench.disturbed == ["cached step at 8: busy"]


def test_without_transformers_the_peer_is_left_out_with_one_line(quiet, monkeypatch):
    monkeypatch.setattr(transformers_gpt2, "find_spec", lambda name: None)
    bench = numpy_gpt2._Bench(tiny_model(), (4, 8), repeats=1, attempts=1)
    bench.transformers()
    assert bench.seconds == {} and bench.notes == [
        "transformers left out: not installed (requirements-test.lock has it)"
    ]


def test_without_the_chapter_the_plain_loop_is_left_out_with_one_line(quiet, monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "chapters_dir", lambda: tmp_path)
    bench = numpy_gpt2._Bench(tiny_model(), (4, 8), repeats=1, attempts=1)
    bench.plain_loop()
    assert bench.seconds == {} and bench.notes == ["plain loop left out: chapter 01 is not there"]


def test_a_peer_with_another_answer_is_no_peer():
    ours = np.zeros((2, 3), np.float32)
    transformers_gpt2.same_answer(ours, ours + np.float32(1e-4))
    with pytest.raises(ValueError, match="differ by 0.01, not by ≤ 0.001: not the same work"):
        transformers_gpt2.same_answer(ours, ours + np.float32(0.01))
    with pytest.raises(ValueError, match="not the same work"):
        transformers_gpt2.same_answer(ours, ours[:1])


# --- what is timed ----------------------------------------------------------------------


def spied_weights(model, kind):
    """The model's weights seen through a subclass of ndarray, whatever it keeps them in."""
    if model.config.architecture == "gpt2":
        model.params = {name: array.view(kind) for name, array in model.params.items()}
        model.__dict__.pop("_layers", None)
    else:
        model._layers = [{key: array.view(kind) for key, array in layer.items()} for layer in model._layers]
        model._head = model._head.view(kind)


@pytest.mark.parametrize("name, heads, a_layer", [("gpt2", {}, 6), ("smollm2-135m", {"num_kv_heads": 1}, 6)])
def test_the_replay_makes_every_product_of_a_step(name, heads, a_layer):
    """Multiplied shapes of the model's own step and of the replay, in order: the same list."""
    model = tiny_model(name, **heads)
    cache = ContiguousCache.for_model(model)
    model(range(10), cache)
    multiplied = {"step": [], "replay": []}

    class Spied(np.ndarray):
        side = "step"

        def __array_ufunc__(self, ufunc, method, *inputs, out=None, **rest):
            if ufunc is np.matmul:
                multiplied[Spied.side].append(tuple(np.shape(i)[-2:] for i in inputs))
            plain = [i.view(np.ndarray) if isinstance(i, Spied) else i for i in inputs]
            if out is not None:
                rest["out"] = tuple(o.view(np.ndarray) if isinstance(o, Spied) else o for o in out)
            result = getattr(ufunc, method)(*plain, **rest)
            return result.view(Spied) if isinstance(result, np.ndarray) else result

    spied_weights(model, Spied)
    cache._k, cache._v = cache._k.view(Spied), cache._v.view(Spied)
    model([1], cache)
    replay = step_products(model, cache)
    Spied.side = "replay"
    replay()
    assert len(multiplied["step"]) == a_layer * model.config.num_layers + 1
    assert multiplied["replay"] == multiplied["step"]


def test_the_plain_loop_is_the_chapters_tagged_code(tmp_path):
    cells = [
        ("code", ["plain-gpt2"], "def double(x):\n    return 2 * x"),
        ("code", [], "raise RuntimeError('an untagged cell ran')"),
        ("markdown", ["plain-gpt2"], "no code"),
        ("code", ["timing", "plain-gpt2"], "def plain_gpt2(x):\n    return double(np.float32(x))"),
    ]
    cells = [{"cell_type": k, "metadata": {"tags": t}, "source": [s]} for k, t, s in cells]
    path = tmp_path / "chapter.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert chapter_code.tagged_code(path, "plain-gpt2")["plain_gpt2"](3) == 6


def test_a_chapter_without_the_function_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "chapters_dir", lambda: tmp_path)
    (tmp_path / "01_the_waste.ipynb").write_text('{"cells": []}', encoding="utf-8")
    with pytest.raises(ValueError, match="defines no plain_gpt2 in a cell tagged plain-gpt2"):
        chapter_code.plain_gpt2()


# --- what is printed and kept --------------------------------------------------------------


def test_the_table_marks_a_held_and_a_missed_limit(run):
    seconds = run["results"]["seconds"]
    seconds["products"][-1], seconds["cached"][0] = 0.009, 0.005
    text = numpy_gpt2.table(run)
    assert re.search(r"cached step at 60 ÷ its matrix products +1\.11 +≤ 1\.25 +pass$", text, re.M)
    assert re.search(r"cached step at 60 ÷ at 4 +2\.00 +≤ 1\.45 +MISS$", text, re.M)
    assert re.search(r"uncached ÷ cached at 60, package +1\.00$", text, re.M)
    assert re.search(r"^cached step +5\.0 +10\.0 +10\.0 +10\.0 +10\.0$", text, re.M)
    assert "transformers," not in text


@pytest.fixture
def no_process(run, monkeypatch):
    monkeypatch.setattr(numpy_gpt2, "_run_in_own_process", lambda args: run)
    return run


def test_without_out_nothing_is_written(no_process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path)
    numpy_gpt2.main(options("--quick"))
    assert "Not kept. With --out it would be written to" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_out_keeps_the_run(no_process, tmp_path):
    numpy_gpt2.main(options("--quick", "--out", str(tmp_path / "kept.json")))
    assert json.loads((tmp_path / "kept.json").read_text(encoding="utf-8")) == no_process


@pytest.mark.parametrize("kind, bench", [("numpy", numpy_gpt2), ("torch", torch_gpt2)])
def test_a_path_that_cannot_be_written_is_one_line_before_timing(kind, bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_run_in_own_process", lambda args: pytest.fail("timed first"))
    (tmp_path / "a_file").write_text("kept", encoding="utf-8")
    for path in (tmp_path, tmp_path / "a_file" / "run.json", tmp_path / f"{'x' * 300}.json"):
        assert cli.main(["bench", kind, "--out", str(path)]) == 1
        line = rf"kvcourse: --out {re.escape(str(path))}: [^\n]+: name a file that can be written\n"
        assert re.fullmatch(line, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]
    assert (tmp_path / "a_file").read_text(encoding="utf-8") == "kept"


def test_looking_whether_a_path_can_be_written_leaves_no_file(tmp_path):
    numpy_gpt2.check_writable(tmp_path / "deeper" / "run.json")
    assert list((tmp_path / "deeper").iterdir()) == []
    (tmp_path / "old.json").write_text("old", encoding="utf-8")
    numpy_gpt2.check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text(encoding="utf-8") == "old"


def test_a_write_that_fails_after_all_is_one_line(no_process, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(cli.CommandError, match="run.json: No space left on device: name a file"):
        numpy_gpt2.main(options("--quick", "--out", str(tmp_path / "run.json")))


def test_a_disturbed_run_is_shown_but_not_kept(no_process, tmp_path, capsys):
    no_process["results"]["disturbed"] = ["cached step at 8: busy"]
    with pytest.raises(cli.CommandError, match="not kept, the run was disturbed .cached step at 8: busy."):
        numpy_gpt2.main(options("--quick", "--out", str(tmp_path / "kept.json")))
    assert not (tmp_path / "kept.json").exists()
    assert "disturbed: cached step at 8: busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("Intel(R) Xeon(R) Processor", "numpy-intel-xeon"),
        ("Intel(R) Core(TM) i7-1185G7 @ 3.00GHz", "numpy-intel-core-i7-1185g7"),
        ("Apple M2", "numpy-apple-m2"),
    ],
)
def test_the_file_is_named_after_the_processor(cpu, name):
    assert numpy_gpt2.default_path(cpu) == paths.data_dir() / "measurements" / f"{name}.json"


def test_the_timing_process_gets_a_clean_environment(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "1")
    monkeypatch.setenv("KEPT", "yes")
    environment = numpy_gpt2.clean_environment(threads=3)
    assert environment["KEPT"] == "yes" and environment["OMP_NUM_THREADS"] == "3"
    assert not {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} & environment.keys()


@pytest.mark.parametrize("model", list(numpy_gpt2.MODELS))
def test_the_command_runs_its_own_process(capfd, model):
    """The whole way once: command, process, JSON, table. One thread: other work slows that least."""
    words = ["--quick", "--no-transformers", "--threads", "1"]
    assert cli.main(["bench", "numpy", "--model", model, *words]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"a tiny {model}") and ", 1 thread, " in out


def test_only_what_is_promised_of_a_shape_has_a_limit():
    seconds = {key: [0.1] * 5 for key in ("cached", "products", "peer_cached")}
    found = {kind: numpy_gpt2.ratios(seconds, numpy_gpt2.LENGTHS, kind) for kind in ("numpy", "numpy-llama")}
    limits = {kind: [limit for _, _, limit in ratios] for kind, ratios in found.items()}
    assert limits == {"numpy": [1.25, 0.9, 1.45], "numpy-llama": [1.25, None, None]}


def test_a_failed_timing_process_is_one_line(monkeypatch, capfd):
    failed = subprocess.CompletedProcess([], returncode=1, stdout=b"")
    monkeypatch.setattr(numpy_gpt2.subprocess, "run", lambda *args, **kwargs: failed)
    assert cli.main(["bench", "numpy", "--quick"]) == 1
    assert capfd.readouterr().err == (
        "kvcourse: the timing process ended with status 1, its own words are above\n"
    )
