"""The Markdown tables and the picture, of rows made by hand."""

import numpy
import pytest
from bench_rows import row_of
from lgelu_lab.kernel_bench import table


def test_table_has_providers_down_and_sizes_across():
    rows = [
        row_of(provider="gelu", saved_bytes_per_element="4"),
        row_of(provider="gelu", size="32x64x32x32", memory_format="channels_last"),
        row_of(provider="lambda_gelu", kernel="cpu", hardness="2", ratio_median="0.456"),
        row_of(provider="lambda_gelu", kernel="cpu", hardness="20", ratio_median="0.7"),
        row_of(provider="lambda_gelu", kernel="cpu", hardness="2", size="4096", ratio_median="9"),
        row_of(provider="relu", mode="forward"),
    ]
    text = table.markdown_tables(rows, ["both"], ["float32"], [2.0])
    lines = text.splitlines()
    assert lines[0] == "**Forward and backward, float32, 1 thread, allocator keep**"
    assert lines[4:] == [
        "| Provider | 32x64x32x32:channels_last | 256x256 | Saved bytes per element |",
        "| --- | ---: | ---: | ---: |",
        "| GELU (erf) | 1.00 | 1.00 | 4.0 |",
        "| λ-GELU, kernel cpu (automatic), λ = 2 |  | 0.46 |  |",
    ]
    with pytest.raises(ValueError, match="no row"):
        table.markdown_tables(rows, ["backward"], ["float32"], [2.0])


def test_table_of_steps_gives_the_range_of_memory():
    peaks = {"mlp-4x256": "1", "gpt2-4x256": "0.7741", "resnet18-cifar": "0.9"}
    rows = [row_of(mode="step", size=size, memory_format="", peak_ratio=peak) for size, peak in peaks.items()]
    text = table.markdown_tables(rows, ["both"], ["float32"], [2.0])
    assert text.splitlines()[-1] == "| ReLU | 1.00 | 1.00 | 1.00 | 0.774 to 1.000 |"


def swept_rows():
    for provider, factor in (("copy", 0.2), ("gelu", 1.0), ("lambda_gelu", 0.5)):
        hardness = "2" if provider == "lambda_gelu" else ""
        for size in ("4096", "65536", "1048576", "256x256"):
            elements = int(numpy.prod([int(n) for n in size.split("x")]))
            times = {f"milliseconds_{q}": f"{factor * elements * 1e-6 * by:g}" for q, by in QUANTILES}
            ratios = {f"ratio_{q}": f"{factor * by:g}" for q, by in QUANTILES}
            yield row_of(provider=provider, size=size, elements=str(elements), hardness=hardness, **times, **ratios)


QUANTILES = (("q20", 0.9), ("median", 1.0), ("q80", 1.1))


def test_figure_shows_the_rows(tmp_path):
    figure = pytest.importorskip("lgelu_lab.kernel_bench.figure")
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "bench.png"
    rows = list(swept_rows())
    chosen = figure.Selection("float32", 2.0, 1, "keep")
    figure.draw_figure(rows, path, chosen)
    pixels = numpy.asarray(image.open(path).convert("RGB"))
    for provider in ("lambda_gelu", "copy"):
        colour = figure.LOOKS[provider][0].lstrip("#")
        drawn = (pixels == [int(colour[i : i + 2], 16) for i in (0, 2, 4)]).all(axis=-1)
        # On the left its line, on the right its mark: both halves hold the colour.
        assert drawn[:, : drawn.shape[1] // 2].any()
        assert drawn[:, drawn.shape[1] // 2 :].any()
    for absent in (figure.Selection("bfloat16", 2.0, 1, "keep"), figure.Selection("float32", 3.0, 1, "keep")):
        # A picture of GELU alone would be titled by the λ.
        with pytest.raises(ValueError, match=r"no row of λ-GELU \((bfloat16|float32), λ = [23]"):
            figure.draw_figure(rows, path, absent)
    with pytest.raises(ValueError, match="several devices"):
        figure.draw_figure([*rows, row_of(provider="gelu", device="other")], path, chosen)


def test_table_keeps_allocators_and_threads_apart():
    rows = [
        row_of(provider="relu", allocator=allocator, threads=threads, ratio_median=ratio)
        for allocator, threads, ratio in (("keep", "1", "0.1"), ("stock", "1", "0.2"), ("keep", "2", "0.3"))
    ]
    lines = table.markdown_tables(rows, ["both"], ["float32"], [2.0]).splitlines()
    assert [line for line in lines if line.startswith(("**", "| ReLU"))] == [
        *("**Forward and backward, float32, 1 thread, allocator keep**", "| ReLU | 0.10 |  |"),
        *("**Forward and backward, float32, 1 thread, allocator stock**", "| ReLU | 0.20 |  |"),
        *("**Forward and backward, float32, 2 threads, allocator keep**", "| ReLU | 0.30 |  |"),
    ]


@pytest.mark.parametrize(
    ("column", "other"),
    [("dtype", "bfloat16"), ("hardness", "20"), ("threads", "2"), ("allocator", "stock"), ("mode", "forward")],
)
def test_figure_shows_no_row_of_another_kind(column, other):
    figure = pytest.importorskip("lgelu_lab.kernel_bench.figure")
    chosen = figure.Selection("float32", 2.0, 1, "keep")
    row = row_of(provider="lambda_gelu", hardness="2")
    assert chosen.holds(row)
    assert not chosen.holds(row | {column: other})
