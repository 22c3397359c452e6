"""The measured rows as a Markdown table beside what we want to stay within."""

from collections.abc import Mapping, Sequence

from lgelu_lab.conversion_bench.cases import CASES


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """One line a row, the named networks first."""
    lines = [
        "| network | rows | widest layer | threads | seconds | peak memory | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (bool(CASES[row["case"]].sweep), list(CASES).index(row["case"]))):
        case = CASES[row["case"]]
        target = "–" if case.target_seconds is None else f"≤ {case.target_seconds:g} s"
        target += "" if case.target_gib is None else f", {case.target_gib:g} GiB"
        lines.append(
            f"| {case.name} | {int(row['rows']):,} | {int(row['width']):,} | {row['threads']} | "
            f"{float(row['seconds']):.2f} | {float(row['peak_gib']):.2f} GiB | {target} |"
        )
    return "\n".join(lines)
