"""Every command of a script that a page shows is one that the script's parser takes."""

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(
    r"(?:^|`)((?:python|accelerate launch)[^`\n]*? ?scripts/(\w+)\.py(?: [^`\n]*)?)(?=`|$)", re.MULTILINE
)


def commands():
    """(page, script, its arguments), without comments at their ends; a line ends where no backslash continues it."""
    found = {}
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        for line, script in COMMAND.findall(text):
            words = shlex.split(line, comments=True)
            behind = words[words.index(f"scripts/{script}.py") + 1 :]
            found[f"{page.name}: {script} {' '.join(behind)}"] = (script, behind)
    return found


class ParsedError(Exception):
    """The parser took all; what comes after it is not run."""


FOUND = commands()


def test_the_pages_commands_are_found():
    assert {script for script, _ in FOUND.values()} >= {"train", "study", "measure", "report", "convert_zoo"}
    assert len(FOUND) > 10


@pytest.mark.parametrize(("script", "arguments"), FOUND.values(), ids=FOUND.keys())
def test_the_parser_takes_what_the_page_says(script, arguments, monkeypatch):
    parse = argparse.ArgumentParser.parse_known_args

    def stop(self, *given, **options):
        named, rest = parse(self, *given, **options)
        if not self.add_help:  # a first look at one argument
            return named, rest
        assert not rest
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    with pytest.raises(ParsedError):
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
