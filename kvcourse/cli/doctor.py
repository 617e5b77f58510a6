"""`kvcourse doctor`: is this machine ready for the course, and if not, what mends it.

`findings()` is what chapter 00 shows in a cell; the command prints the same as a table. Names and their order
are fixed, so that a notebook can compare them; what was found differs from machine to machine.
"""

import importlib.metadata
import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from kvcourse import fetch, paths, weights

MINIMUM_PYTHON = (3, 11)  # as in pyproject.toml; a test compares them
MINIMUM_MEMORY = 2 * 2**30  # bytes free: GPT-2 124M in float32 is 0.5 GB, PyTorch and its peer copy the rest
LAB_EXTENSIONS = ("@jupyter-widgets/jupyterlab-manager", "anywidget", "jupyterlab-plotly")
INSTALL_AGAIN = "run `python install.py` again, or `pip install -r requirements.lock` in this environment"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `remedy` is what to do when it is not `ok`, and empty otherwise."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def findings():
    """All findings in a fixed order, a list of Finding. Looks only at this machine; opens no connection."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def _guarded(name, check):
    """The check's Finding; one that breaks down is itself a finding, so that the others still show."""
    try:
        ok, found, *remedy = check()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(name, False, f"could not be checked ({reason})", INSTALL_AGAIN)
    return Finding(name, ok, found, "" if ok else remedy[0])


def python():
    """(ok, found, remedy): is this Python new enough."""
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, MINIMUM_PYTHON))
    remedy = f"install Python >= {wanted} and set up again: PYTHON=python3.12 make lab"
    return sys.version_info >= MINIMUM_PYTHON, f"{version} at {sys.executable}", remedy


def packages():
    """(ok, found, remedy): does every package that applies here have the version in requirements.lock."""
    lock = locked_versions(paths.repository_dir() / "requirements.lock")
    differing = []
    for name, version in lock.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            differing.append(f"{name} missing")
            continue
        if installed.split("+")[0] != version:  # torch's local part (+cpu, +cu130) names the build only
            differing.append(f"{name} {installed} (locked {version})")
    if not differing:
        return True, f"{len(lock)} as in requirements.lock"
    shown = ", ".join(differing[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
    return False, f"{len(differing)} of {len(lock)} differ: {shown}", INSTALL_AGAIN


def locked_versions(lock):
    """{name: version} of the pins in a lock file whose environment markers hold on this machine."""
    from packaging.requirements import Requirement

    versions = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", "-")):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                versions[requirement.name] = next(iter(requirement.specifier)).version
    return versions


def server():
    """(ok, found, remedy): do the Jupyter server and this kernel run in the same environment.

    Where they differ, widgets and figures stay blank without any error. In a terminal there is no server to
    compare with.
    """
    prefix = _server_prefix()
    here = Path(sys.prefix)
    if prefix is None:
        return True, "no notebook server above this process"
    if _same_folder(prefix, here):
        return True, f"server and kernel both run in {here}"
    remedy = "stop that server and start the course's own: `make lab` or `kvcourse lab`"
    return False, f"the server runs in {prefix}, this kernel in {here}", remedy


def _server_prefix():
    """The environment of the process that started this kernel, or None when there is none or it is not known.

    Known are environments with a marker of their own: pyvenv.cfg (venv) or conda-meta (conda). The command
    line is read because the process's executable is the base Python, the same for all environments.
    """
    import psutil

    parent = os.environ.get("JPY_PARENT_PID", "")
    if os.name == "nt" or not parent.isdigit():  # on Windows the variable holds a handle, not a process id
        return None
    try:
        first = Path(psutil.Process(int(parent)).cmdline()[0])
    except (psutil.Error, IndexError):
        return None
    prefix = first.parent.parent
    marked = first.is_absolute() and ((prefix / "pyvenv.cfg").exists() or (prefix / "conda-meta").exists())
    return prefix if marked else None


def kernel():
    """(ok, found, remedy): does the kernel named python3, which all notebooks ask for, start this Python."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    mend = f"run `{sys.executable} -m ipykernel install --sys-prefix`"
    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return False, "no kernel named python3", mend
    first = spec.argv[0]
    if not Path(first).is_absolute():  # "python": Jupyter puts the server's own interpreter there
        return True, f"python3 starts {sys.executable}"
    same = _same_folder(Path(first).parent, Path(sys.executable).parent)
    remedy = f"{mend}, or remove {spec.resource_dir}"
    return same, f"python3 starts {first}" + ("" if same else f", not {sys.executable}"), remedy


def widgets():
    """(ok, found, remedy): are the browser parts of the widgets where the server looks, and switched on."""
    from jupyter_core.paths import jupyter_path
    from jupyterlab_server.config import get_static_page_config

    prefix = _server_prefix() or Path(sys.prefix)
    if _same_folder(prefix, Path(sys.prefix)):
        folders = [Path(folder) for folder in jupyter_path("labextensions")]
    else:
        folders = [prefix / "share" / "jupyter" / "labextensions"]
    missing = [
        name
        for name in LAB_EXTENSIONS
        if not any((folder / name / "package.json").is_file() for folder in folders)
    ]
    if missing:
        return False, f"{', '.join(missing)} not found for the server in {prefix}", INSTALL_AGAIN
    disabled = get_static_page_config(level="all").get("disabledExtensions", {})
    off = [name for name in LAB_EXTENSIONS if disabled.get(name)]
    if off:
        return False, f"{', '.join(off)} switched off", f"run `jupyter labextension enable {off[0]}`"
    return True, f"{len(LAB_EXTENSIONS)} extensions found: {', '.join(LAB_EXTENSIONS)}"


def pytorch():
    """(ok, found, remedy): does PyTorch load and multiply."""
    import torch

    works = torch.equal(torch.eye(2) @ torch.ones(2, 2), torch.ones(2, 2))
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return works, f"{torch.__version__}, {build} build, {torch.get_num_threads()} threads", INSTALL_AGAIN


def gpu():
    """(ok, found, remedy): which GPU PyTorch sees, or why none. No chapter needs one, so none is ok.

    Not ok is only a machine with an NVIDIA driver, and a PyTorch built for it, that do not find together.
    """
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        visible = torch.cuda.is_available()
    if visible:
        device = torch.cuda.get_device_properties(0)
        return (
            True,
            f"{torch.cuda.device_count()} visible: {device.name}, {device.total_memory / 2**30:.0f} GiB",
        )
    if torch.backends.mps.is_available():
        return True, "Apple GPU visible to PyTorch (mps)"
    driver = os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None:
        return True, "none used: this PyTorch is the CPU build" + (
            ", though an NVIDIA driver is here" * driver
        )
    if not driver:
        return True, "none: no NVIDIA driver on this machine"
    reason = str(said[0].message).splitlines()[0] if said else "no device answers"
    remedy = "update the NVIDIA driver, or check CUDA_VISIBLE_DEVICES; every chapter runs without a GPU, too"
    found = f"NVIDIA driver found, but PyTorch for CUDA {torch.version.cuda} cannot use it: {reason}"
    return False, found, remedy


def triton():
    """(ok, found): is Triton here, in which chapter 17's kernel is written. No chapter needs it."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return True, "none: chapter 17 runs its kernel's loop in NumPy"
    return True, f"{version}: chapter 17 runs its kernel"


def model_weights():
    """(ok, found, remedy): are the bundled models, and those fetched, whole by their SHA-256."""
    whole, damaged, absent = [], [], ""
    for name, model in weights.available().items():
        if not (model.bundled or model.folder):
            if model.converted:
                absent = f"; {name}, which some chapters need, is not here: kvcourse weights fetch {name}"
            continue
        try:
            weights.verify(name)
            whole.append(name)
        except fetch.DamagedFile as error:
            damaged.append(str(error))
    if damaged:
        return (
            False,
            damaged[0],
            "see `kvcourse weights verify`; bundled files come back with `git checkout data`",
        )
    found = f"whole: {', '.join(whole) or 'none'}{absent}"
    return bool(whole), found, "get the clone again: data/models is empty"


def memory():
    """(ok, found, remedy): is there enough free memory for the largest model of the chapters."""
    import psutil

    now = psutil.virtual_memory()
    found = f"{now.available / 2**30:.1f} of {now.total / 2**30:.1f} GiB free"
    remedy = f"close other programs: {MINIMUM_MEMORY / 2**30:.0f} GiB are needed"
    return now.available >= MINIMUM_MEMORY, found, remedy


def _same_folder(one, other):
    return os.path.normcase(os.path.realpath(one)) == os.path.normcase(os.path.realpath(other))


CHECKS = {
    "Python": python,
    "packages": packages,
    "server and kernel": server,
    "kernel python3": kernel,
    "widgets": widgets,
    "PyTorch": pytorch,
    "GPU": gpu,
    "Triton": triton,
    "weights": model_weights,
    "memory": memory,
}


def table(found):
    """The findings as text: one line each, the remedy under what is not ok, a verdict at the end."""
    width = max(len(finding.name) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{'ok' if finding.ok else 'NOT OK':<6}  {finding.name:<{width}}  {finding.found}")
        if not finding.ok:
            lines.append(f"{'':<6}  {'':<{width}}  to fix it: {finding.remedy}")
    wrong = sum(not finding.ok for finding in found)
    lines.append("everything is ready" if not wrong else f"{wrong} of {len(found)} need attention")
    return "\n".join(lines)


def main(args=None):
    """Print the table; status 1 when something is not ok."""
    found = findings()
    print(table(found))
    return 0 if all(finding.ok for finding in found) else 1
