"""A conversion's report with round numbers, for what is written and drawn from one."""

import dataclasses

from hf_lgelu.comparing.distance import Distance
from hf_lgelu.refit.report import ConversionReport, Evaluation, LayerRefit


def distance(kl, agreement, largest_change, relative_error, rows=1024, **others):
    return Distance("", rows, kl, agreement, largest_change, 100.0, relative_error, **others)


LAYERS = (
    LayerRefit(("h.0.mlp.c_proj",), ("h.0.mlp.act",), "refit", 0.001, 0.25, 0.0123456, 512, 6144, 0.5),
    LayerRefit(("h.1.mlp.c_proj",), ("h.1.mlp.act",), "bias only", None, 0.5, 0.4, 512, 6144, 0.25, "few rows | d"),
    LayerRefit(("conv2", "downsample.0"), ("act1",), "unchanged", None, 0.03, 0.03, 576, 6144),
)
HELD_OUT = Evaluation(
    rows=1024, samples=8, original_metrics={},
    direct=distance(0.5, 0.5, 12.5, 0.25), refitted=distance(0.00125, 0.99996, 0.5, 0.0003),
)  # fmt: skip
SECOND = Evaluation(
    rows=2048, samples=2048, original_metrics={"perplexity": 113.186},
    direct=distance(1.5, 0.25, 25.0, 0.75, metrics={"perplexity": 292.361}),
    refitted=distance(0.0025, 1.0, 0.75, 0.0005, metrics={"perplexity": 113.424}),
)  # fmt: skip
REPORT = ConversionReport(
    model="GPT2LMHeadModel",
    gates={"h.0.mlp.act": "gelu_new", "h.1.mlp.act": "gelu_new", "act1": "silu"},
    layers=LAYERS, held_out=HELD_OUT, evaluation=SECOND, samples=66, distinct_samples=64, rows=8192, folds=4,
    seconds=3.14159, config_changes=("activation_function: gelu_new → relu",), smooth_calls=("attn: softmax",),
    warnings=("fewer rows than features in conv2",),
)  # fmt: skip
SMALL = dataclasses.replace(
    REPORT, held_out=None, evaluation=None, samples=20, distinct_samples=20, rows=20, folds=1, warnings=(),
    smooth_calls=(), config_changes=(),
    layers=(dataclasses.replace(LAYERS[0], error_before=None, error_after=None, rows=20),),
)  # fmt: skip
