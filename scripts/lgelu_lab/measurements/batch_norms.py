"""The direct swap with the statistics of every BatchNorm taken anew: how much of its loss is theirs."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_lgelu import substitute_relu
from hf_lgelu.models.sites import SMOOTH_KINDS
from lgelu_lab.benchmarks.benchmark import Benchmark

_ROWS = 128  # of a batch, whose variance is one sample of those that are averaged


def batch_norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The BatchNorms of a model that keep statistics."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [norm for norm in norms if norm.track_running_stats]


@torch.no_grad()
def with_new_statistics(model: PreTrainedModel, calibration: Any, benchmark: Benchmark) -> PreTrainedModel:
    """A copy with ReLU gates, whose BatchNorms have the mean and variance of what they are given then; weights stay."""
    student = copy.deepcopy(model).eval()
    substitute_relu(student, kinds=SMOOTH_KINDS)
    for norm in batch_norms(student):
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    for batch in DataLoader(calibration, batch_size=_ROWS, collate_fn=benchmark.collate):
        student(**{name: tensor for name, tensor in batch.items() if name != "labels"})
    return student.eval()
