"""`kv.generate` is the function in whatever order names are first used: a module has the same name."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "first", ["kv.sampled", "kv.greedy", "kv.generate", "import kvcourse.generate", "kv.load_model"]
)
def test_generate_is_the_function(first):
    code = f"import kvcourse as kv\n{first}\nimport types; assert isinstance(kv.generate, types.FunctionType)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
