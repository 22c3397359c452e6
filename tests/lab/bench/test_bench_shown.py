"""The Markdown tables, of rows made by hand."""

import pytest
from bench_rows import cells_of, frame_of
from lgelu_lab.kernel_bench import shown


def test_table_has_providers_down_and_sizes_across(tmp_path):
    rows = [
        cells_of(provider="gelu", saved_bytes_per_element="4"),
        cells_of(provider="gelu", size="32x64x32x32", memory_format="channels_last"),
        cells_of(provider="lambda_gelu", kernel="cpu", hardness="2", ratio_median="0.456"),
        cells_of(provider="lambda_gelu", kernel="cpu", hardness="20", ratio_median="0.7"),
        cells_of(provider="lambda_gelu", kernel="cpu", hardness="2", size="4096", ratio_median="9"),
        cells_of(provider="relu", mode="forward"),
    ]
    text = shown.markdown_tables(frame_of(tmp_path / "bench.csv", rows), ["both"], ["float32"], [2.0])
    lines = text.splitlines()
    assert lines[0] == "**Forward and backward, float32, 1 thread, allocator keep**"
    assert lines[4:] == [
        "| Provider | 32x64x32x32:channels_last | 256x256 | Saved bytes per element |",
        "| --- | ---: | ---: | ---: |",
        "| GELU (erf) | 1.00 | 1.00 | 4.0 |",
        "| λ-GELU, kernel cpu (automatic), λ = 2 |  | 0.46 |  |",
    ]
    with pytest.raises(ValueError, match="no row"):
        shown.markdown_tables(frame_of(tmp_path / "bench.csv", rows), ["backward"], ["float32"], [2.0])
