"""The examples in the docstrings of the public names: each has one or is in another's, and each does what it says."""

import doctest
import re

import pytest
import torch

import hf_lgelu

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def doctest_code(documented):
    """What the example of a name calls, as a set of words."""
    examples = doctest.DocTestParser().get_examples(documented.__doc__ or "")
    return set(re.findall(r"\w+", " ".join(example.source for example in examples)))


CONSTANTS = {name for name in hf_lgelu.__all__ if not hasattr(getattr(hf_lgelu, name), "__module__")}

NAMES = [name for name in hf_lgelu.__all__ if name not in CONSTANTS]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    documented = getattr(hf_lgelu, name)
    tests = doctest.DocTestFinder(recurse=False).find(documented, name, globs={})
    examples = [test for test in tests if test.examples]
    if not examples:
        used = [other for other in NAMES if name in doctest_code(getattr(hf_lgelu, other))]
        assert used, f"{name} has no example in its docstring, and is in no other name's"
    messages = []
    for test in examples:
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=messages.append)
    assert not messages, "".join(messages)
