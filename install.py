"""Set up the course: make .venv, install the locked packages and this clone into it.

    python install.py            what `make lab` does before it opens JupyterLab
    python install.py --test     the test packages on top, as `make test` does

A second call returns at once unless a lock file, pyproject.toml or an option changed. pip runs with the
reader's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf ...). Standard library only, and written so
that an old Python can still read the file and say that it is too old.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

MINIMUM = (3, 11)
ROOT = os.path.dirname(os.path.abspath(__file__))
LOCKS = {"run": "requirements.lock", "test": "requirements-test.lock"}
NETWORK_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "SSLError",
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "Connection refused",
    "ConnectionResetError",
    "Remote end closed connection",
)


class SetupError(Exception):
    """A set-up step failed; the message is the one line the reader sees."""


def check_python(version, executable):
    """Raise SetupError when `version` (major, minor, ...) is below MINIMUM; name a newer Python from PATH."""
    if tuple(version[:2]) >= MINIMUM:
        return
    which = getattr(shutil, "which", lambda name: None)
    newer = [name for name in ("python3.14", "python3.13", "python3.12", "python3.11") if which(name)]
    raise SetupError(
        "Python %s (%s) is too old: the course needs Python >= %d.%d. Choose another interpreter, "
        "for example PYTHON=%s make lab"
        % (
            ".".join(str(part) for part in version[:3]),
            executable,
            MINIMUM[0],
            MINIMUM[1],
            (newer or ["python3.12"])[0],
        )
    )


def check_venv_module(version, executable):
    """Raise SetupError when this Python lacks what makes virtual environments (Debian packages it apart)."""
    import importlib.util  # not there in Python 2, which check_python has turned away

    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise SetupError(
                "Python %d.%d (%s) cannot make virtual environments (no module %s): on Debian or Ubuntu "
                "run `apt install python3-venv`, elsewhere choose another interpreter with PYTHON=..."
                % (version[0], version[1], executable, module)
            )


def venv_python(venv):
    """Path of the interpreter inside the virtual environment folder `venv`."""
    return os.path.join(venv, *(["Scripts", "python.exe"] if os.name == "nt" else ["bin", "python"]))


def venv_version(venv):
    """[major, minor] of an existing, working virtual environment that has pip; None when there is none."""
    if not os.path.exists(venv_python(venv)):
        return None
    try:
        answer = subprocess.run(
            [venv_python(venv), "-c", "import pip, sys; print(*sys.version_info[:2])"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return [int(part) for part in answer.stdout.split()]


def ensure_venv(venv, rebuild):
    """Make `venv` when it is missing or broken, or has another Python version and `rebuild` is set."""
    found = venv_version(venv)
    if found and not (rebuild and found != list(sys.version_info[:2])):
        check_python(found, venv_python(venv))
        return
    check_python(sys.version_info, sys.executable)
    check_venv_module(sys.version_info, sys.executable)
    print("making %s with Python %d.%d" % ((os.path.relpath(venv),) + tuple(sys.version_info[:2])))
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", venv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if made.returncode:
        lines = made.stdout.decode(errors="replace").strip().splitlines() or ["no message"]
        raise SetupError(
            "cannot make %s: %s: move away what is there, or choose another folder with --venv"
            % (venv, lines[-1])
        )


def wanted_state(args):
    """What the stamp file says when the installation is up to date: hashes of the files that decide it."""

    def digest(name):
        try:
            with open(os.path.join(ROOT, name), "rb") as file:
                return hashlib.sha256(file.read()).hexdigest()
        except (IOError, OSError) as error:
            reason = error.strerror
        raise SetupError("cannot read %s (%s): get it back with `git checkout -- %s`" % (name, reason, name))

    state = {name: digest(name) for name in ("requirements.lock", "pyproject.toml")}
    state["torch"] = args.torch
    state["root"] = ROOT  # an editable install points at the clone, so a moved clone must install again
    if args.test:
        state["requirements-test.lock"] = digest("requirements-test.lock")
    return state


def is_current(stamp_file, wanted):
    """True when the stamp covers `wanted`; test packages more than wanted, or the CPU torch, do no harm."""
    try:
        with open(stamp_file) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(stamp, dict) and all(
        stamp.get(key) in (value, "cpu" if key == "torch" else value) for key, value in wanted.items()
    )


def torch_arguments(args):
    """pip arguments for PyTorch's CPU build. Only Linux has two builds; elsewhere the usual one is taken."""
    if args.torch != "cpu" or not sys.platform.startswith("linux"):
        return []
    with open(os.path.join(ROOT, "requirements.lock")) as file:
        version = re.search(r"^torch==([^\s;]+)", file.read(), re.MULTILINE).group(1)
    return ["torch==%s+cpu" % version, "--extra-index-url", args.torch_index]


def explain(stderr, details, log):
    """One line for a failed pip run: what failed and the way out.

    `stderr` is what pip wrote there and `details` its log, which alone names the broken connection when pip
    was told not to retry. A retry that is followed by another failure is not taken for the cause.
    """
    lines = stderr.strip().splitlines() or ["no message"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    missing = re.search(r"No matching distribution found for ([^\s(]+)", stderr)
    network = [sign for sign in NETWORK_SIGNS if sign in (stderr + details if missing else errors[-1])]
    remedy = (
        "use a mirror (PIP_INDEX_URL=https://.../simple) or a folder of wheels "
        "(PIP_NO_INDEX=1 PIP_FIND_LINKS=/folder) and run again; log: %s" % log
    )
    if network:
        package = " while looking for %s" % missing.group(1) if missing else ""
        return "no connection to the package index%s (%s): %s" % (package, network[0], remedy)
    if missing:
        return "no %s for this Python and machine on the package index: %s" % (missing.group(1), remedy)
    return "pip failed: %s; log: %s" % (errors[-1].replace("ERROR: ", ""), log)


def pip(venv, arguments):
    """Run `pip install` in `venv`; progress goes to the terminal, a failure becomes one line (SetupError)."""
    log = os.path.join(venv, "pip.log")
    if os.path.exists(log):
        os.remove(log)
    command = [venv_python(venv), "-m", "pip", "install", "--disable-pip-version-check", "--log", log]
    done = subprocess.run(command + arguments, cwd=ROOT, stderr=subprocess.PIPE)
    if done.returncode:
        details = ""
        if os.path.exists(log):
            with open(log, "rb") as file:
                details = file.read().decode(errors="replace")
        raise SetupError(explain(done.stderr.decode(errors="replace"), details, os.path.relpath(log, ROOT)))


def set_up(args):
    """Bring the virtual environment up to date; returns whether anything had to be installed."""
    venv = os.path.join(ROOT, args.venv)
    stamp_file = os.path.join(venv, "kvcourse-installed.json")
    wanted = wanted_state(args)
    ensure_venv(venv, args.use_this_python)
    if is_current(stamp_file, wanted):
        return False
    if os.path.exists(stamp_file):
        os.remove(stamp_file)
    pip(venv, ["-r", LOCKS["test" if args.test else "run"]] + torch_arguments(args))
    pip(venv, ["--quiet", "--no-deps", "--no-build-isolation", "-e", "."])
    with open(stamp_file, "w") as file:
        json.dump(wanted, file, indent=1)
    return True


def parser():
    """The command line of this script."""
    result = argparse.ArgumentParser(prog="install.py", description="Set up the course in .venv.")
    result.add_argument("--test", action="store_true", help="install what the tests need, too")
    result.add_argument(
        "--torch",
        choices=["default", "cpu"],
        default="default",
        help="cpu: on Linux take PyTorch's CPU build (default: the package index's own build)",
    )
    result.add_argument(
        "--torch-index",
        default="https://download.pytorch.org/whl/cpu",
        metavar="URL",
        help="where --torch cpu looks besides the package index (default: %(default)s)",
    )
    result.add_argument(
        "--venv", default=".venv", help="folder of the virtual environment (default: %(default)s)"
    )
    result.add_argument(
        "--use-this-python",
        action="store_true",
        help="make .venv again when it was made with another Python version",
    )
    return result


def main(argv=None):
    """Set up and report; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        if set_up(args):
            kvcourse = os.path.join(args.venv, "Scripts" if os.name == "nt" else "bin", "kvcourse")
            print("ready: %s lab" % kvcourse)
    except SetupError as error:
        sys.stderr.write("kvcourse: %s\n" % error)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("kvcourse: set-up interrupted; run it again to go on\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
