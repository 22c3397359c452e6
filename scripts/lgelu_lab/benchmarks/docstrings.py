"""English prose that lies on any machine: the docstrings of installed packages."""

import ast
import importlib.metadata
from collections.abc import Iterator
from random import Random

PACKAGES = ("scipy", "sympy", "torch", "transformers")


def docstring_paragraphs() -> Iterator[str]:
    """Paragraphs of English in the docstrings of installed packages, each once, in a seeded order."""
    found = set()
    for package in PACKAGES:
        for file in importlib.metadata.files(package) or ():
            if file.suffix == ".py":
                found |= set(_paragraphs(file.locate().read_text(encoding="utf-8", errors="ignore")))
    ordered = sorted(found)
    Random(0).shuffle(ordered)
    yield from ordered


def _paragraphs(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for part in (ast.get_docstring(node) or "").split("\n\n"):
                text = " ".join(part.split())
                letters = sum(letter.isalpha() or letter == " " for letter in text)
                if len(text.split()) >= 12 and ">>>" not in text and letters > 0.88 * len(text):
                    yield text
