import pytest
from lgelu_lab.report.readme import END, START, put_results


def test_the_tables_replace_what_was_between_the_marks():
    text = f"# Title\n\n{START}\nold\n{END}\n\nmore\n"
    once = put_results(text, "| new |")
    assert once == f"# Title\n\n{START}\n\n| new |\n\n{END}\n\nmore\n"
    assert put_results(once, "| new |") == once


@pytest.mark.parametrize("text", ["", START, f"{END}\n{START}", f"{START}{END}{START}{END}"])
def test_a_readme_without_its_marks_is_left_alone(text):
    with pytest.raises(ValueError, match="once each"):
        put_results(text, "| new |")
