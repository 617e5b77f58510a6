"""Every test, also a bare `pytest --nbval chapters`, starts from an empty reader's record."""

import os
import tempfile
from pathlib import Path

try:
    import hypothesis
except ImportError:  # comes with `make test`; the notebooks do not need it
    hypothesis = None

# Set before any kernel starts: kernels inherit the environment. A reader's own predictions
# would show in the outputs, and a test must not write into their record.
_home = tempfile.TemporaryDirectory(prefix="kvcourse-test-")
os.environ["KVCOURSE_HOME"] = _home.name
os.environ["KVCOURSE_PROGRESS"] = str(Path(_home.name) / "progress.json")
os.environ.pop("KVCOURSE_SHARED", None)

if hypothesis is not None:
    # The same examples in every run, and no deadline: these machines are shared and noisy.
    hypothesis.settings.register_profile("course", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("course")
