"""The examples in the docstrings of the public names: each has one, and each does what it says."""

import doctest

import pytest
import torch

import hf_lgelu

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
CONSTANTS = {name for name in hf_lgelu.__all__ if not hasattr(getattr(hf_lgelu, name), "__module__")}


@pytest.mark.parametrize("name", [name for name in hf_lgelu.__all__ if name not in CONSTANTS])
def test_the_example_of_a_public_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    documented = getattr(hf_lgelu, name)
    tests = doctest.DocTestFinder(recurse=False).find(documented, name, globs={})
    examples = [test for test in tests if test.examples]
    assert examples, f"{name} has no example in its docstring"
    messages = []
    for test in examples:
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=messages.append)
    assert not messages, "".join(messages)


def test_constants_are_few():
    assert "__version__" in CONSTANTS
    assert all(name.isupper() for name in CONSTANTS - {"__version__"})
