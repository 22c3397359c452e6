"""Optional packages are imported when they are needed, through `require`, and nowhere else."""

import ast
from pathlib import Path

import pytest

from hf_lgelu.environment import require

PACKAGE = Path(__file__).parents[2] / "hf_lgelu"
OPTIONAL = {"onnx", "onnxscript", "onnxruntime"}


def imported(source):
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def test_importing_the_package_needs_no_optional_one():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    assert {path.name: names for path in files if (names := imported(path.read_text("utf-8")) & OPTIONAL)} == {}


def test_an_absent_package_names_the_extra():
    assert require("json", "onnx") is __import__("json")
    with pytest.raises(ImportError, match=r"no_such_package cannot be imported .*pip install 'hf-lgelu\[onnx\]'") as no:
        require("no_such_package", "onnx")
    assert no.value.name == "no_such_package"
