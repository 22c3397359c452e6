"""The bias fold, for comparison alone: ReLU gates, and only the biases behind them fitted.

It is not offered as a conversion, since it can be worse than the direct swap.
"""

import copy
import functools
import operator
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_lgelu import substitute_relu
from hf_lgelu.models.batches import read_batches
from hf_lgelu.models.example_run import evaluation_mode
from hf_lgelu.models.sites import SMOOTH_KINDS, find_sites
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.program import Programs
from hf_lgelu.refit.ridge import RidgeFit
from hf_lgelu.refit.verdict import ConversionRefusedError
from hf_lgelu.refit.weights import write_refit
from lgelu_lab.benchmarks.benchmark import Benchmark


def fold_biases(model: PreTrainedModel, calibration: Any, benchmark: Benchmark) -> PreTrainedModel:
    """A copy with ReLU gates in which each bias behind them makes up for the mean error; weights stay.

    Layer by layer as in `convert_to_relu`, on the same rows, every layer's choice being "bias only".

    Raises:
        ValueError: the calibration inputs do not do.
        ConversionRefusedError: a map behind a gate cannot be changed.
    """
    sites = find_sites(model, SMOOTH_KINDS)
    student = copy.deepcopy(model)
    substitute_relu(student, kinds=SMOOTH_KINDS)
    folds = deal_folds(read_batches(calibration, data_collator=benchmark.collate))
    with evaluation_mode(model), Carrier(Programs(model, sites), student, folds) as carrier:
        if carrier.layers.unfit:
            reasons = "; ".join(f"{unfit.name}: {unfit.reason}" for unfit in carrier.layers.unfit)
            raise ConversionRefusedError(f"the biases behind some gates cannot be fitted: {reasons}")
        for index, layer in enumerate(carrier.layers.layers):
            total = functools.reduce(operator.add, carrier.moments(index))
            if layer.has_intercept:
                write_refit(student, carrier.trace.program, layer, _bias_only(total), total)
    return student


def _bias_only(total: Moments) -> RidgeFit:
    """The mean residual (g, m) as the change of the bias, and no change of the weights (g, m, d)."""
    weight_change = torch.zeros_like(total.cross.mT)
    return RidgeFit("bias only", None, weight_change, total.residual_sum / total.count, None, None)
