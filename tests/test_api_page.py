"""docs/api.md names every public name, and is what the script writes."""

import importlib.util
from pathlib import Path

import pytest

import hf_lgelu

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "scripts" / "api_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_one_that_is_written_from_the_docstrings(script):
    assert script.PAGE.read_text("utf-8") == script.page(), "run: python scripts/api_page.py"


def test_a_name_that_is_in_no_section_is_an_error(script, monkeypatch):
    monkeypatch.setattr(hf_lgelu, "__all__", [*hf_lgelu.__all__, "forgotten"])
    with pytest.raises(ValueError, match=r"forgotten.* belongs in one section"):
        script.page()
