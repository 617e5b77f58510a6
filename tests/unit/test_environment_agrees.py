"""pyproject.toml, the lock files and environment.yml name the same packages and the same Pythons."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvcourse.cli import doctor

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOWEST = re.match(r">=(\d+\.\d+)$", PROJECT["requires-python"]).group(1)


def lock_lines(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins(name):
    """{canonical name: [Requirement]} of a lock file; several where the version depends on the Python."""
    found = {}
    for line in lock_lines(name):
        if not line.startswith("-r "):
            requirement = Requirement(line)
            found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


RUNTIME = pins("requirements.lock")
TESTS = pins("requirements-test.lock")


def assert_pinned(dependency, lock):
    """`dependency` (text of a requirement) has at least one pin, and every pin lies in its range."""
    wanted = Requirement(dependency)
    pinned = lock.get(canonicalize_name(wanted.name), [])
    assert pinned, f"{wanted.name} is in pyproject.toml, but not in the lock: run `make lock`"
    for pin in pinned:
        version = next(iter(pin.specifier)).version
        assert wanted.specifier.contains(version), f"{pin} is outside {wanted.specifier}: run `make lock`"


@pytest.mark.parametrize("dependency", PROJECT["dependencies"])
def test_every_dependency_is_locked_within_its_range(dependency):
    assert_pinned(dependency, RUNTIME)


@pytest.mark.parametrize("dependency", PROJECT["optional-dependencies"]["test"])
def test_every_test_dependency_is_locked_within_its_range(dependency):
    assert_pinned(dependency, {**RUNTIME, **TESTS})


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-test.lock"])
def test_a_lock_holds_exact_public_versions_and_no_cuda_package(lock):
    for name, pinned in pins(lock).items():
        assert not re.match(r"nvidia-|cuda-", name), f"{name}: PyTorch's own business, differs by machine"
        for pin in pinned:
            (specifier,) = pin.specifier
            assert specifier.operator == "==" and "*" not in specifier.version
            assert Version(specifier.version).local is None, f"{pin} names one build"
        markers = [pin.marker for pin in pinned]
        assert len(pinned) == 1 or all(markers), f"{name} is pinned twice without a marker"


def test_triton_is_the_tests_and_the_version_that_pytorch_asks_for():
    """PyTorch's CUDA build asks for one exact version, its CPU build for none: the lock must suit both."""
    (dependency,) = PROJECT["optional-dependencies"]["kernels"]
    assert_pinned(dependency, TESTS)
    assert "triton" not in RUNTIME
    (pin,) = TESTS["triton"]
    assert str(pin.marker) == str(Requirement(dependency).marker)
    asked = [r for r in map(Requirement, metadata.requires("torch")) if r.name == "triton"]
    if not asked:
        pytest.skip("this build of PyTorch asks for no Triton: nothing to agree with")
    assert asked[0].specifier == pin.specifier


def test_the_test_lock_stands_on_the_other():
    assert lock_lines("requirements-test.lock")[0] == "-r requirements.lock"
    assert not RUNTIME.keys() & TESTS.keys()


def test_the_build_backend_is_locked():
    """The package is installed without build isolation, so that a folder of wheels is enough."""
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert_pinned(backend, RUNTIME)


def test_conda_installs_the_same_packages():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (through_pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert environment["name"] == PROJECT["name"]
    # Python and pip come from conda, everything else from the lock: no second list that could differ.
    assert through_pip == ["-r requirements.lock", "-e ."]
    python, pip = conda
    assert pip == "pip" and python.startswith("python")
    versions = SpecifierSet(python.removeprefix("python"))
    allowed = SpecifierSet(PROJECT["requires-python"])
    minors = [f"3.{minor}" for minor in range(6, 30)]
    assert min(versions.filter(minors), key=Version) == LOWEST
    assert all(allowed.contains(minor) for minor in versions.filter(minors))


def test_the_lowest_python_is_the_same_everywhere():
    lowest = tuple(map(int, LOWEST.split(".")))
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    install = (ROOT / "install.py").read_text(encoding="utf-8")
    assert doctor.MINIMUM_PYTHON == lowest
    assert config["tool"]["ruff"]["target-version"] == f"py{LOWEST.replace('.', '')}"
    assert f"MINIMUM = {lowest}" in install
    assert f"--python-version {LOWEST} " in (ROOT / "Makefile").read_text(encoding="utf-8")
