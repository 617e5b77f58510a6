"""The architecture, held by a test: a module imports only from rows above its own, or from its own row."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "kvcourse"

ROWS = [
    {"arguments", "paths", "fetch"},
    {"config", "hub_config"},
    {"ops", "ggml_blocks"},
    {"evaluation"},
    {"measure", "streams"},
    {"sizing"},
    {"paging"},
    {"kernels"},
    {"tokenizer", "chat", "gguf_convert", "smollm2", "weights"},
    {"caches"},
    {"tap"},
    {"models"},
    {"loading", "generate", "needle", "diagnosis"},
    {"engine"},
    {"torch_models"},
    {"progress"},
    {"figures", "widgets"},
    {"checks"},
    {"bench", "cli"},
]
ROW_OF = {module: number for number, row in enumerate(ROWS) for module in row}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path):
    """The name in the table: `caches` for kvcourse/caches/base.py, `ops` for kvcourse/ops.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree):
    """Modules of the package that a file imports, anywhere in it; "" stands for the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "kvcourse"]
            yield from (name.partition(".")[2].split(".")[0] for name in names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield ""  # a relative import hides the row it comes from
        elif isinstance(node, ast.ImportFrom) and node.module == "kvcourse":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("kvcourse."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_imports_point_upward(path):
    own = module_of(path)
    assert own in ROW_OF, f"{own} stands in no row: give it a place in the table"
    for other in imported(ast.parse(path.read_text(encoding="utf-8"))):
        assert other in ROW_OF, f"{path.name} imports kvcourse.{other}: name a module of the table"
        assert ROW_OF[other] <= ROW_OF[own], f"{own} imports {other}, which stands below it"


@pytest.mark.parametrize(
    "line, modules",
    [
        ("import kvcourse.ops as o", ["ops"]),
        ("import kvcourse as kv", [""]),
        ("from kvcourse import ops, paths", ["ops", "paths"]),
        ("from kvcourse.caches.base import KVCache", ["caches"]),
        ("from . import ops", [""]),
        ("def f():\n    from kvcourse import bench", ["bench"]),
        ("import numpy\nfrom pathlib import Path", []),
    ],
)
def test_the_parser_sees_every_kind_of_import(line, modules):
    assert list(imported(ast.parse(line))) == modules


def test_import_kvcourse_is_light_and_offline():
    """No torch, plotly, ipywidgets or NumPy, and no socket, until a name that needs them is used."""
    program = (
        "import sys, socket\n"
        "def refuse(*a, **k): raise AssertionError('a connection was attempted')\n"
        "socket.socket.connect = refuse\n"
        "import kvcourse\n"
        "print(sorted({'torch', 'plotly', 'ipywidgets', 'numpy', 'tiktoken'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_every_public_name_resolves():
    import kvcourse

    for name in kvcourse.__all__:
        assert getattr(kvcourse, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvcourse.nothing  # noqa: B018 - looking it up is the point
