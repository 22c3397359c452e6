"""The package's parts import one way, read off the source with ast."""

import ast
import functools
import sys
from pathlib import Path

import hf_lgelu

PACKAGE = Path(__file__).parents[1] / "hf_lgelu"

# What a part may import of the others. The top-level __init__ collects the public names; nothing imports it.
ALLOWED = {
    "activation": set(),
    "networks": {"activation"},  # looks at a model
    "graph": {"activation", "networks"},  # what is read off a recording
    "comparing": {"activation", "networks"},
    "models": {"activation", "networks", "comparing"},  # changes a model
    "training": {"activation", "networks", "comparing", "models"},
    "evaluate": {"comparing"},
    "refit": {"activation", "networks", "graph", "comparing", "models"},
    "export": {"activation", "networks", "graph", "comparing", "models", "refit.report", "refit.config"},
    "cli": {"activation", "networks", "graph", "comparing", "models", "training", "refit", "export"},
}
ANYWHERE = {"version", "environment", "files", "formats", "processes", "registry"}
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "base"}

FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, at any depth; `from a import b` counts as a and as a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(_package_of(path, node.level)) if node.level else ""
            base = ".".join(part for part in (start, node.module) if part)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def _package_of(path: Path, level: int) -> tuple[str, ...]:
    folders = ("hf_lgelu", *path.relative_to(PACKAGE).parts[:-1])
    return folders[: len(folders) - level + 1]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def within(path: Path) -> set[str]:
    """What a file imports of the package, without the leading name."""
    return {name.removeprefix("hf_lgelu.") for name in imported(path) if name.startswith("hf_lgelu.")}


def test_there_is_something_to_look_at():
    assert {"activation", "networks", "models"} <= {part_of(path) for path in FILES}
    assert "activation.module" in within(PACKAGE / "networks" / "sites.py")


def test_imports_point_one_way():
    known = [path for path in FILES if part_of(path) in ALLOWED]
    assert all(path.parent == PACKAGE for path in set(FILES) - set(known)), "a part that ALLOWED does not name"
    for path in known:
        assert "hf_lgelu" not in imported(path), f"{path}: name the module that holds what you import"
        allowed = {part_of(path), *ANYWHERE, *ALLOWED[part_of(path)]}
        wrong = {name for name in within(path) if not any(f"{name}.".startswith(f"{one}.") for one in allowed)}
        assert not wrong, f"{path} must not import {wrong}; allowed: {sorted(allowed)}"


def test_the_activation_needs_torch_alone():
    for path in (PACKAGE / "activation").rglob("*.py"):
        outside = {name.partition(".")[0] for name in imported(path)} - {"hf_lgelu"}
        assert outside <= {"torch", "triton", *sys.stdlib_module_names}, path


def test_no_file_of_the_library_knows_the_laboratory():
    known = {str(path.relative_to(PACKAGE)) for path in FILES if any(n.startswith("lgelu_lab") for n in imported(path))}
    assert known == set()


LABORATORY = PACKAGE.parent / "scripts"
# What the laboratory may import of the library in addition to its public names, and for what.
LISTED = {
    "activation.gates",  # which activation names harden
    "activation.hardness",  # the target of a tolerance
    "activation.module",
    "activation.kernels",  # kernel_bench times each backend by itself
    "environment",  # the hardware and the versions of a record
    "export.card",
    "export.onnx_run",
    "files",  # a file that is whole or not there
    "formats",
    "comparing",  # the comparison of two networks over batches
    "networks.batches",
    "networks.run",  # hooks at gates
    "models.checkpoint",  # loading and saving with the processor's files
    "models.hardening",  # the smallest λ of gates with several, for their cards
    "networks.sites",
    "models.surgery",  # the granularities, for a command line
    "networks.outputs",  # the label that is not counted
    "refit.config",  # the efforts that a conversion can be asked for
    "refit.report",
    "training.resume",  # the last checkpoint that is whole
}


def test_the_laboratory_uses_public_names():
    public = {f"hf_lgelu.{name}" for name in hf_lgelu.__all__}
    for path in LABORATORY.rglob("*.py"):
        for name in within(path) - {name.removeprefix("hf_lgelu.") for name in public}:
            assert any(f"{name}.".startswith(f"{listed}.") for listed in LISTED), (
                f"{path}: {name} is no public name of hf_lgelu; import one, or list its module here with the reason"
            )


def test_names_say_what_a_module_is():
    named = {path.stem for path in FILES} | {path.parent.name for path in FILES}
    assert named & VAGUE == set()


TESTS = Path(__file__).parent
# Tests of no single module; those of tests/families are of every part.
OF_NO_MODULE = {
    "accelerate_configs", "docs", "docstrings", "layering", "neighbours", "package", "script_commands", "size",
}  # fmt: skip


def _may_be_named_after(folder: Path) -> set[str]:
    """Modules and folders that tests in a folder may be named after."""
    match folder.relative_to(TESTS).parts:
        case ():
            found = PACKAGE.glob("*.py")
        case ("lab", *room):
            found = [*LABORATORY.glob("*.py"), *(LABORATORY / "lgelu_lab").joinpath(*room).rglob("*.py")]
        case (room, *_):
            found = (PACKAGE / room).rglob("*")
    return {path.stem for path in found if path.suffix in ("", ".py")}


def test_each_test_file_is_named_after_a_module():
    for path in TESTS.rglob("test_*.py"):
        name = path.stem.removeprefix("test_")
        if path.parent.name != "families" and name not in OF_NO_MODULE:
            assert any(f"{name}_".startswith(f"{module}_") for module in _may_be_named_after(path.parent)), (
                f"{path}: of test_MODULE.py or test_MODULE_WHAT.py, MODULE is none of {path.parent.name}"
            )
