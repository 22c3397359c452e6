"""The results section of a README, kept equal to what the records say."""

START = "<!-- results: written by scripts/report.py --readme README.md -->"
END = "<!-- end of results -->"


def put_results(readme: str, tables: str) -> str:
    """The text with `tables` between its two marks.

    Raises ValueError unless each of `START` and `END` is there once, in that order.
    """
    if readme.count(START) != 1 or readme.count(END) != 1 or readme.index(START) > readme.index(END):
        raise ValueError(
            f"the README must have {START!r} and, behind it, {END!r}, once each, to put the results between"
        )
    before, after = readme.partition(START)[0], readme.partition(END)[2]
    return f"{before}{START}\n\n{tables}\n\n{END}{after}"
