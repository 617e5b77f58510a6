"""`kvcourse doctor`: every way it can find something wrong, and what it then says."""

import importlib.metadata
import sys
from collections import namedtuple

import psutil
import pytest
import torch

from kvcourse import cli, fetch, weights
from kvcourse.cli import doctor
from kvcourse.cli.doctor import Finding


def finding(name):
    return next(f for f in doctor.findings() if f.name == name)


def test_names_and_order_are_fixed():
    """Chapter 00 compares them."""
    assert [f.name for f in doctor.findings()] == [
        "Python",
        "packages",
        "server and kernel",
        "kernel python3",
        "widgets",
        "PyTorch",
        "GPU",
        "Triton",
        "weights",
        "memory",
    ]


def test_exit_status_and_table(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"good": lambda: (True, "fine")})
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok      good  fine\neverything is ready\n"
    monkeypatch.setattr(
        doctor, "CHECKS", {"good": lambda: (True, "fine"), "bad": lambda: (False, "gone", "get it")}
    )
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["NOT OK  bad   gone", "              to fix it: get it", "1 of 2 need attention"]


def test_a_check_that_breaks_down_is_a_finding(monkeypatch):
    def broken():
        raise ImportError("no module named x\nsecond line")

    monkeypatch.setattr(doctor, "CHECKS", {"broken": broken, "good": lambda: (True, "fine")})
    first, second = doctor.findings()
    assert first == Finding(
        "broken", False, "could not be checked (ImportError: no module named x)", doctor.INSTALL_AGAIN
    )
    assert second.ok


def test_old_python(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 4, "final", 0))
    found = finding("Python")
    assert not found.ok and found.found.startswith("3.10.4") and ">= 3.11" in found.remedy


def lock_with(monkeypatch, tmp_path, text):
    (tmp_path / "requirements.lock").write_text(text)
    monkeypatch.setattr(doctor.paths, "repository_dir", lambda: tmp_path)


def test_packages_against_the_lock(monkeypatch, tmp_path):
    numpy = importlib.metadata.version("numpy")
    torch_version = importlib.metadata.version("torch").split("+")[0]
    lock_with(monkeypatch, tmp_path, f"# comment\n-r other\nnumpy=={numpy}\ntorch=={torch_version}\n")
    assert finding("packages") == Finding("packages", True, "2 as in requirements.lock")
    lock_with(
        monkeypatch,
        tmp_path,
        "numpy==0.1\nno-such-package==2 ; sys_platform != 'x'\nnone==1 ; sys_platform == 'x'",
    )
    found = finding("packages")
    assert not found.ok
    assert found.found == f"2 of 2 differ: numpy {numpy} (locked 0.1), no-such-package missing"
    assert "install.py" in found.remedy


def environment(folder):
    """A folder that looks like a virtual environment; returns its interpreter's path."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("")
    return folder / "bin" / "python"


def started_by(monkeypatch, *command_line):
    """Pretend that this process is a kernel started by a process with this command line."""
    monkeypatch.setenv("JPY_PARENT_PID", "4242")
    process = namedtuple("Process", "cmdline")(lambda: [str(word) for word in command_line])
    monkeypatch.setattr(psutil, "Process", lambda pid: {4242: process}[pid])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell a kernel the server's process id")
def test_server_of_another_environment(monkeypatch, tmp_path):
    other = environment(tmp_path / "other")
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path / "mine"))
    started_by(monkeypatch, environment(tmp_path / "mine"), "-m", "jupyterlab")
    assert finding("server and kernel").ok
    started_by(monkeypatch, other, other.with_name("jupyter-lab"))
    found = finding("server and kernel")
    assert not found.ok and str(tmp_path / "other") in found.found and "kvcourse lab" in found.remedy
    found = finding("widgets")  # the server looks in its own environment, where no extension is
    assert not found.ok and "anywidget" in found.found and str(tmp_path / "other") in found.found


@pytest.mark.parametrize("command_line", [[], ["python"], ["/no/such/bin/python"]])
def test_server_that_is_not_known_is_no_finding(monkeypatch, command_line):
    started_by(monkeypatch, *command_line)
    assert finding("server and kernel") == Finding(
        "server and kernel", True, "no notebook server above this process"
    )


def kernel_spec(monkeypatch, argv, folder="/spec"):
    from jupyter_client import kernelspec

    spec = namedtuple("Spec", "argv resource_dir")(argv, folder)
    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", lambda self, name: spec)


def test_kernel_of_another_python(monkeypatch):
    kernel_spec(monkeypatch, ["python", "-m", "ipykernel_launcher"])
    assert finding("kernel python3").ok
    kernel_spec(monkeypatch, [sys.executable, "-m", "ipykernel_launcher"])
    assert finding("kernel python3").ok
    kernel_spec(
        monkeypatch, ["/elsewhere/bin/python", "-m", "ipykernel_launcher"], "/home/me/kernels/python3"
    )
    found = finding("kernel python3")
    assert (
        not found.ok and "/elsewhere/bin/python" in found.found and "/home/me/kernels/python3" in found.remedy
    )


def test_no_kernel(monkeypatch):
    from jupyter_client import kernelspec

    def none(self, name):
        raise kernelspec.NoSuchKernel(name)

    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", none)
    found = finding("kernel python3")
    assert not found.ok and "ipykernel install" in found.remedy


def test_widgets_missing_or_switched_off(monkeypatch, tmp_path):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))
    (tmp_path / "labconfig").mkdir()
    (tmp_path / "labconfig" / "page_config.json").write_text('{"disabledExtensions": {"anywidget": true}}')
    found = finding("widgets")
    assert (found.ok, found.found, found.remedy) == (
        False,
        "anywidget switched off",
        "run `jupyter labextension enable anywidget`",
    )
    monkeypatch.setattr(doctor, "LAB_EXTENSIONS", ("no-such-extension",))
    found = finding("widgets")
    assert not found.ok and found.found.startswith("no-such-extension not found")


def gpu_state(monkeypatch, visible=False, cuda=None, driver=False, mps=False):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor.os.path, "exists", lambda path: driver)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)


def test_gpu_states(monkeypatch):
    gpu_state(monkeypatch)
    assert doctor.gpu() == (True, "none used: this PyTorch is the CPU build")
    gpu_state(monkeypatch, driver=True)
    assert doctor.gpu() == (True, "none used: this PyTorch is the CPU build, though an NVIDIA driver is here")
    gpu_state(monkeypatch, cuda="13.0")
    assert doctor.gpu() == (True, "none: no NVIDIA driver on this machine")
    gpu_state(monkeypatch, mps=True)
    assert doctor.gpu() == (True, "Apple GPU visible to PyTorch (mps)")
    gpu_state(monkeypatch, visible=True, cuda="13.0", driver=True)
    device = namedtuple("Device", "name total_memory")("Some GPU", 80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert doctor.gpu() == (True, "2 visible: Some GPU, 80 GiB")
    gpu_state(monkeypatch, cuda="13.0", driver=True)
    ok, found, remedy = doctor.gpu()
    assert not ok and "cannot use it" in found and "update the NVIDIA driver" in remedy


def test_triton_may_be_absent(monkeypatch):
    versions = {"triton": "3.7.1"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert doctor.triton() == (True, "3.7.1: chapter 17 runs its kernel")
    versions.clear()
    assert doctor.triton() == (True, "none: chapter 17 runs its kernel's loop in NumPy")


def known(name, bundled, folder):
    return weights.KnownModel(name, bundled, (), folder)


def test_damaged_and_missing_weights(monkeypatch, tmp_path):
    models = {
        "good": known("good", True, tmp_path),
        "bad": known("bad", True, tmp_path),
        "away": known("away", False, None),
    }
    monkeypatch.setattr(weights, "available", lambda: models)

    def verify(name):
        if name == "bad":
            raise fetch.DamagedFile("bad/model.safetensors is damaged: copy it again")

    monkeypatch.setattr(weights, "verify", verify)
    found = finding("weights")
    assert not found.ok and found.found == "bad/model.safetensors is damaged: copy it again" and found.remedy
    del models["bad"]
    assert finding("weights") == Finding("weights", True, "whole: good")
    del models["good"]
    assert not finding("weights").ok


def test_little_memory(monkeypatch):
    memory = namedtuple("Memory", "available total")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(2**30, 8 * 2**30))
    found = finding("memory")
    assert not found.ok and found.found == "1.0 of 8.0 GiB free" and "2 GiB" in found.remedy
