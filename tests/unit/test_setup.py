"""install.py and the Makefile: when something is installed, and the one-line errors."""

import argparse
import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(folder=ROOT):
    """The module install.py of `folder`, which is what it then sets up."""
    spec = importlib.util.spec_from_file_location("install", folder / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path):
    """A folder with install.py and two small lock files in place of the course's."""
    shutil.copy(ROOT / "install.py", tmp_path)
    (tmp_path / "requirements.lock").write_text("no-such-package==1.0\ntorch==2.9.1 ; sys_platform != 'x'\n")
    (tmp_path / "requirements-test.lock").write_text("-r requirements.lock\n")
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


@pytest.fixture
def quiet(clone, monkeypatch):
    """(install module of `clone`, list of pip calls): neither a virtual environment nor pip is started."""
    install, calls = load(clone), []
    (clone / ".venv").mkdir()
    monkeypatch.setattr(install, "ensure_venv", lambda venv, rebuild: None)
    monkeypatch.setattr(install, "pip", lambda venv, arguments: calls.append(arguments))
    return install, calls


def run(install, calls, *options):
    """Call install.py; returns what pip was asked for."""
    calls.clear()
    assert install.main(list(options)) == 0
    return list(calls)


def test_install_once_then_return_at_once(quiet, capsys):
    install, calls = quiet
    assert run(install, calls) == [
        ["-r", "requirements.lock"],
        ["--quiet", "--no-deps", "--no-build-isolation", "-e", "."],
    ]
    assert "kvcourse lab" in capsys.readouterr().out
    assert run(install, calls) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("changed", ["requirements.lock", "pyproject.toml"])
def test_a_changed_file_installs_again(quiet, clone, changed):
    install, calls = quiet
    run(install, calls)
    (clone / changed).write_text((clone / changed).read_text() + "# changed\n")
    assert run(install, calls)
    assert run(install, calls) == []


def test_tests_come_on_top_and_also_serve_without(quiet, clone):
    install, calls = quiet
    run(install, calls)
    assert run(install, calls, "--test")[0] == ["-r", "requirements-test.lock"]
    assert run(install, calls) == run(install, calls, "--test") == []
    (clone / "requirements-test.lock").write_text("-r requirements.lock\nruff==1\n")
    assert run(install, calls) == []
    assert run(install, calls, "--test")


def test_a_moved_clone_installs_again(quiet, clone, monkeypatch):
    install, calls = quiet
    run(install, calls)
    shutil.copytree(clone, clone / "elsewhere")
    monkeypatch.setattr(install, "ROOT", str(clone / "elsewhere"))
    assert run(install, calls)


def test_an_interrupted_installation_is_done_again(quiet, clone, monkeypatch):
    install, calls = quiet
    run(install, calls)
    (clone / "requirements.lock").write_text("torch==2.9.2\n")

    def broken(venv, arguments):
        raise install.SetupError("no disk left")

    with monkeypatch.context() as patch:
        patch.setattr(install, "pip", broken)
        assert install.main([]) == 1
    (clone / "requirements.lock").write_text("no-such-package==1.0\ntorch==2.9.1 ; sys_platform != 'x'\n")
    assert run(install, calls)


def test_cpu_build_of_torch(quiet, monkeypatch):
    install, calls = quiet
    monkeypatch.setattr(install.sys, "platform", "linux")
    run(install, calls)
    extra = ["torch==2.9.1+cpu", "--extra-index-url", "https://mirror.example/cpu"]
    assert run(install, calls, "--torch", "cpu", "--torch-index", extra[-1])[0][2:] == extra
    assert run(install, calls) == [], "a later plain call keeps the build that is there"
    monkeypatch.setattr(install.sys, "platform", "darwin")
    assert install.torch_arguments(argparse.Namespace(torch="cpu", torch_index="")) == []


def script(clone, *options, patch="", **environment):
    """Run install.py of `clone` as a program, after the lines `patch`, without any setting of pip's."""
    code = f"import runpy, sys\n{patch}\nsys.argv = {['install.py', *options]!r}\n"
    code += f"runpy.run_path({str(clone / 'install.py')!r}, run_name='__main__')"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", **environment},
        capture_output=True,
        text=True,
    )


def one_line(answer):
    """The error line of a failed run; fails unless it is exactly one, with status 1."""
    assert answer.returncode == 1 and answer.stderr.count("\n") == 1, answer.stderr
    assert answer.stderr.startswith("kvcourse: ")
    return answer.stderr


@pytest.mark.skipif(os.name == "nt", reason="the fake interpreter is a shell script")
def test_python_too_old(clone):
    newer = clone / "bin" / "python3.13"
    newer.parent.mkdir()
    newer.write_text("#!/bin/sh\n")
    newer.chmod(0o755)
    error = one_line(script(clone, patch="sys.version_info = (3, 9, 2, 'final', 0)", PATH=str(newer.parent)))
    assert "Python 3.9.2" in error and ">= 3.11" in error and "PYTHON=python3.13 make lab" in error
    assert not (clone / ".venv").exists()


def test_the_script_uses_no_syntax_that_an_old_python_cannot_read():
    """An f-string or `raise ... from` would be a SyntaxError in the Pythons that are to be turned away."""
    tree = ast.parse((ROOT / "install.py").read_text())
    new = (ast.JoinedStr, ast.NamedExpr, ast.Match, ast.AnnAssign, ast.AsyncFunctionDef, ast.Nonlocal)
    for node in ast.walk(tree):
        assert not isinstance(node, new), f"line {node.lineno}"
        assert not (isinstance(node, ast.Raise) and node.cause), f"line {node.lineno}"
        assert not (isinstance(node, ast.arguments) and (node.kwonlyargs or node.posonlyargs))
    (ROOT / "install.py").read_text(encoding="ascii")  # Python 2 reads nothing else without a declaration


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_no_venv_module(clone, module):
    patch = (
        "import importlib.util\nfind = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name == {module!r} else find(name)"
    )
    error = one_line(script(clone, patch=patch))
    assert f"no module {module}" in error and "apt install python3-venv" in error and "PYTHON=" in error


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """A real, empty virtual environment."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


def test_no_network_and_no_wheels(clone, venv):
    # Port 9 (discard) on the loopback address: nothing listens there, so the connection is refused at once.
    answer = script(clone, "--venv", str(venv), PIP_INDEX_URL="http://127.0.0.1:9/simple")
    error = one_line(answer)
    assert "no connection to the package index" in error and "no-such-package" in error
    for remedy in ("PIP_INDEX_URL=", "PIP_FIND_LINKS=", "mirror", "wheels"):
        assert remedy in error
    assert not (venv / "kvcourse-installed.json").exists()


def test_wheel_folder_without_the_wheel(clone, venv):
    answer = script(clone, "--venv", str(venv), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(clone))
    assert "no no-such-package==1.0 for this Python and machine" in one_line(answer)


def test_other_pip_failures_quote_pip_and_a_retry_is_not_the_cause():
    stderr = "WARNING: Retrying after NewConnectionError\nERROR: Could not install: No space left on device\n"
    error = load().explain(stderr, stderr, "pip.log")
    assert error == "pip failed: Could not install: No space left on device; log: pip.log"


def test_a_connection_lost_during_the_download_is_named():
    stderr = "ERROR: Could not install packages due to an OSError: Max retries exceeded (ReadTimeoutError)\n"
    assert (
        load()
        .explain(stderr, "", "pip.log")
        .startswith("no connection to the package index (ReadTimeoutError)")
    )


def test_an_existing_environment_is_kept_unless_another_python_is_asked_for(venv, monkeypatch):
    install, made = load(), []
    assert install.venv_version(str(venv)) == list(sys.version_info[:2])
    monkeypatch.setattr(
        install, "venv_version", lambda folder: [3, 12] if sys.version_info[1] != 12 else [3, 13]
    )
    monkeypatch.setattr(
        install.subprocess,
        "run",
        lambda line, **more: made.append(line) or subprocess.CompletedProcess(line, 0),
    )
    install.ensure_venv(str(venv), rebuild=False)
    assert made == []
    install.ensure_venv(str(venv), rebuild=True)
    assert made == [[sys.executable, "-m", "venv", "--clear", str(venv)]]


def test_a_missing_lock_is_one_line(clone):
    (clone / "requirements.lock").unlink()
    error = one_line(script(clone))
    assert "cannot read requirements.lock (No such file or directory): get it back with `git" in error


def test_a_file_in_the_place_of_the_environment_is_one_line(clone):
    (clone / ".venv").write_text("")
    assert "move away what is there, or choose another folder with --venv" in one_line(script(clone))


def test_a_stamp_that_is_no_table_installs_again(quiet, clone):
    install, calls = quiet
    (clone / ".venv" / "kvcourse-installed.json").write_text("[]")
    assert run(install, calls)


def test_an_environment_whose_python_is_gone_counts_as_none(tmp_path):
    install = load()
    assert install.venv_version(str(tmp_path)) is None
    python = Path(install.venv_python(str(tmp_path)))
    python.parent.mkdir()
    python.symlink_to("/no/such/python")
    assert install.venv_version(str(tmp_path)) is None


def make(*words, **environment):
    """`make` in the clone, with no setting inherited from a `make test` that runs this test."""
    clean = {
        n: v
        for n, v in os.environ.items()
        if n not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHON", "TORCH", "WORKERS")
    }
    return subprocess.run(
        ["make", *words], cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True
    )


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")


@needs_make
def test_make_hands_its_settings_on():
    plain = make("-n", "lab").stdout
    assert '"python3" install.py --torch default' in plain and "--use-this-python" not in plain
    assert ".venv/bin/kvcourse lab --port 8888" in plain
    chosen = make(
        "-n", "lab", "TORCH=cpu", "TORCH_INDEX=https://mirror.example", "PORT=9", PYTHON="python3.12"
    ).stdout
    assert (
        '"python3.12" install.py --torch cpu --torch-index https://mirror.example --use-this-python' in chosen
    )
    assert "kvcourse lab --port 9" in chosen


@needs_make
@pytest.mark.skipif(os.name == "nt", reason="the fake interpreter is a shell script")
def test_make_with_a_space_in_the_path_of_the_interpreter(tmp_path):
    python = tmp_path / "a b" / "python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "called with $1"\n')
    python.chmod(0o755)
    answer = make("install", PYTHON=str(python))
    assert answer.returncode == 0 and answer.stdout == "called with install.py\n", answer.stderr


@needs_make
def test_make_test_runs_the_cheapest_first_and_the_strict_command():
    steps = make("-n", "test").stdout
    fetch, tests = "kvcourse weights fetch smollm2-135m", "pytest -q -rs -n 2 tests --ignore"
    order = ["install.py", "ruff check .", fetch, tests, "pytest -q -rs -n 2 --nbval chapters"]
    places = [steps.index(step) for step in order]
    assert places == sorted(places) and steps.rindex("tests/browser") > places[-1]


@needs_make
def test_make_with_an_interpreter_that_is_not_there():
    answer = make("install", "PYTHON=python3.99")
    assert answer.returncode and answer.stderr.splitlines()[0] == (
        "kvcourse: no interpreter python3.99 on PATH: install Python >= 3.11 or choose one with PYTHON=..."
    )
