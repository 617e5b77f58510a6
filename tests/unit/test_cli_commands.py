"""The `kvcourse` command as a whole, `weights` and the dispatch of `bench`."""

import subprocess
import sys
import types

import pytest

from kvcourse import cli, fetch, paths, weights

HEAVY = ["torch", "numpy", "plotly", "ipywidgets", "jupyterlab"]


def test_help_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from kvcourse import cli\n"
        "try:\n    cli.main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        f"sys.exit(', '.join(name for name in {HEAVY!r} if name in sys.modules) or 0)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    for word in ("lab", "doctor", "weights", "bench"):
        assert f"\n    {word} " in answer.stdout


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Two known models: `small`, bundled and whole, and `big`, not fetched yet. Returns the bundled file."""
    file = tmp_path / "data" / "models" / "small" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    known = {
        "small": (weights.KnownFile("model.safetensors", fetch.sha256_of(file), 7),),
        "big": (weights.KnownFile("model.safetensors", "0" * 64, 500_000_000, "file:///no/such/file"),),
    }
    monkeypatch.setattr(weights, "_known_files", lambda: known)
    monkeypatch.setattr(paths, "data_dir", lambda: tmp_path / "data")
    monkeypatch.setenv("KVCOURSE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVCOURSE_SHARED", raising=False)
    return file


def test_weights_list(models, capsys):
    assert cli.main(["weights", "list"]) == 0
    small, big = capsys.readouterr().out.splitlines()
    assert small.split() == ["small", "0.0", "MB", "bundled", str(models.parent)]
    assert big.split()[:4] == ["big", "500.0", "MB", "to"] and big.endswith("kvcourse weights fetch big")


def test_weights_verify(models, capsys):
    assert cli.main(["weights", "verify"]) == 0
    assert capsys.readouterr().out == f"small: whole, in {models.parent}\n"
    models.write_bytes(b"weighty")
    assert cli.main(["weights", "verify", "small"]) == 1
    out = capsys.readouterr().out
    assert "damaged" in out and out.count("\n") == 1


def test_weights_fetch(models, capsys):
    assert cli.main(["weights", "fetch", "small"]) == 0
    assert capsys.readouterr().out == f"small: whole, in {models.parent}\n"
    assert cli.main(["weights", "fetch", "big"]) == 1
    assert "kvcourse: file:///no/such/file could not be fetched" in capsys.readouterr().err


def test_weights_fetch_into_a_home_that_is_a_file(models, tmp_path, capsys):
    (tmp_path / "home").write_text("")
    assert cli.main(["weights", "fetch", "big"]) == 1
    err = capsys.readouterr().err
    assert "home" in err and "cannot be written" in err and err.count("\n") == 1


def test_a_bad_setting_is_one_line(models, monkeypatch, capsys):
    monkeypatch.setenv("KVCOURSE_SHARED", "~nosuchuser/x")
    assert cli.main(["weights", "list"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvcourse: KVCOURSE_SHARED is ~nosuchuser/x") and err.count("\n") == 1


@pytest.mark.parametrize("option", ["--repeats", "--threads"])
def test_bench_counts_start_at_one(capsys, option):
    with pytest.raises(SystemExit):
        cli.main(["bench", "numpy", option, "0"])
    assert f"argument {option}: 0 is too few: at least 1" in capsys.readouterr().err


def test_weights_of_an_unknown_model(models, capsys):
    assert cli.main(["weights", "fetch", "gpt9"]) == 1
    assert capsys.readouterr().err == "kvcourse: no model 'gpt9': the course knows small, big\n"


def test_bench_hands_its_options_on(monkeypatch, capsys):
    seen = []
    module = types.ModuleType("fake_bench", "Measures nothing.")
    module.add_arguments = lambda parser: parser.add_argument(
        "--quick", action="store_true", help="fewer repeats"
    )
    module.main = lambda args: seen.append(args.quick)
    monkeypatch.setitem(sys.modules, "fake_bench", module)
    monkeypatch.setattr(cli, "BENCHES", {"fake": "fake_bench"})
    assert cli.main(["bench", "fake", "--quick"]) == 0
    assert cli.main(["bench", "fake"]) == 0
    assert seen == [True, False]
    with pytest.raises(SystemExit):
        cli.main(["bench", "fake", "--help"])
    out = capsys.readouterr().out
    assert "usage: kvcourse bench fake" in out and "fewer repeats" in out


def test_every_bench_has_the_two_functions():
    for name in cli.BENCHES.values():
        module = __import__(name, fromlist=["main"])
        assert callable(module.add_arguments) and callable(module.main)
