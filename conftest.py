"""Every test, also a bare `pytest --nbval chapters`, starts from an empty reader's record."""

import os
import tempfile
from pathlib import Path

import pytest

import kvcourse as kv

try:
    import hypothesis
except ImportError:  # comes with `make test`; the notebooks do not need it
    hypothesis = None

# The one model that is fetched and that tests use: where the reader has it, or None.
SMOLLM2 = kv.weights.available()["smollm2-135m"].folder

# Public traces, which the course does not hold: where the reader has them, or in a folder beside the clone.
_named = [kv.paths.from_environment("KVCOURSE_TRACES")]
_named += [folder and folder / "traces" for folder in (kv.paths.shared_dir(), kv.paths.user_dir())]
_named += [kv.paths.repository_dir().parent / "shared" / "traces"]
TRACES = next((folder for folder in _named if folder and folder.is_dir()), None)

# Set before any kernel starts: kernels inherit the environment. A reader's own predictions
# would show in the outputs, and a test must not write into their record.
_home = tempfile.TemporaryDirectory(prefix="kvcourse-test-")
os.environ["KVCOURSE_HOME"] = _home.name
os.environ["KVCOURSE_PROGRESS"] = str(Path(_home.name) / "progress.json")
os.environ.pop("KVCOURSE_SHARED", None)
if SMOLLM2 is not None:
    os.environ["KVCOURSE_SHARED"] = str(SMOLLM2.parent)
os.environ.pop("KVCOURSE_TRACES", None)
if TRACES is not None:
    os.environ["KVCOURSE_TRACES"] = str(TRACES)

if hypothesis is not None:
    # The same examples in every run, and no deadline: these machines are shared and noisy.
    hypothesis.settings.register_profile("course", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("course")


# Long tests that share nothing with their neighbors; every other file is one worker's, fixtures made once.
SHARED_OUT = ("tests/notebooks/test_run_twice.py", "tests/browser/test_chapters.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`: whole files to the workers, and whole notebooks, but the tests of SHARED_OUT one by one."""
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            return nodeid if file in SHARED_OUT else file

    config.option.loadscopereorder = False  # keep the order below, not the one by number of tests
    return WholeFiles(config, log)


def pytest_collection_modifyitems(config, items):
    """With `-n`: long tests first, so that no worker ends alone. And cells that need SmolLM2 are skipped."""
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        items.sort(key=lambda item: item.nodeid.split("::", 1)[0] not in SHARED_OUT)
    skip_without_smollm2(items)


def skip_without_smollm2(items):
    """Cells of a page that needs SmolLM2 are skipped, visibly, where the model was not fetched.

    With KVCOURSE_REQUIRE_SMOLLM2 set they run and fail: nothing is skipped in silence.
    """
    if SMOLLM2 is not None or os.environ.get("KVCOURSE_REQUIRE_SMOLLM2"):
        return
    skip = pytest.mark.skip(reason="needs SmolLM2: run `kvcourse weights fetch smollm2-135m` (93 MB)")
    needing = {}
    for item in items:
        if item.path.suffix == ".ipynb":
            if item.path not in needing:
                needing[item.path] = "smollm2-135m" in item.path.read_text(encoding="utf-8")
            if needing[item.path]:
                item.add_marker(skip)
