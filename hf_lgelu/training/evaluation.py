"""Parts of a Trainer's evaluation: its second loop, with ReLU substituted, and metrics by modules of `evaluate`."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, Trainer

from hf_lgelu.networks.outputs import IGNORED_LABEL, labels_of_predictions

_COLLECTED = ("_metrics", "_stored_metrics", "accum_loss_components")
"""The attributes where the losses of TRL's and sentence-transformers' trainers collect numbers for their logs."""


def metrics_of_module(
    module: Any, model: nn.Module, prediction: EvalPrediction, compute_result: bool
) -> dict[str, float] | None:
    """The result of a module of `evaluate`, which compares labels with predictions, or integer labels with classes.

    Labels of −100 do not count. Labels of a causal language model are moved to the positions that predict them.
    `compute_result` comes from Trainer: with `batch_eval_metrics`, it is false before the last batch.
    """
    found, labels = (
        torch.as_tensor(given[0] if isinstance(given, tuple | list) else given)
        for given in (prediction.predictions, prediction.label_ids)
    )
    labels = labels_of_predictions(labels, model)
    if found.shape != labels.shape:
        found = found.view_as(labels) if labels.is_floating_point() else found.argmax(-1)
    counted = labels != IGNORED_LABEL
    module.add_batch(predictions=found[counted], references=labels[counted])
    return module.compute() if compute_result else None


def random_state(device: torch.device, data: DataLoader | None = None) -> Callable[[], None]:
    """A function that restores the present random state of Python, NumPy, torch and the sampler of `data`."""
    sources = [each for each in (torch, torch.get_device_module(device)) if hasattr(each, "get_rng_state")]
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), [s.get_rng_state() for s in sources]
    sampler = getattr(getattr(data, "batch_sampler", None), "sampler", None)
    generator = getattr(sampler, "generator", None)  # of Trainer's sampler that groups sequences by length
    of_generator = None if generator is None else generator.get_state()

    def put_back() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for source, state in zip(sources, of_torch, strict=True):
            source.set_rng_state(state)
        if generator is not None:
            generator.set_state(of_generator)

    return put_back


@contextmanager
def loop_undone(trainer: Trainer) -> Iterator[None]:
    """A block after which the random state and the numbers that a trainer's loss collects are as before.

    No callback sees the block, because progress bars count the batches of one loop.
    """
    put_back, handler = random_state(trainer.args.device), trainer.callback_handler
    kept, callbacks = {name: vars(trainer)[name] for name in _COLLECTED if name in vars(trainer)}, handler.callbacks
    vars(trainer).update(copy.deepcopy(kept))
    handler.callbacks = []
    try:
        yield
    finally:
        put_back()
        handler.callbacks = callbacks
        vars(trainer).update(kept)
