import dataclasses
import logging
import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # sentence-transformers asks the Hub for files that a folder lacks


def make_record(
    *, activation="gelu", seed=0, benchmark="mlp-adult", harden=False, init_mode="uniform", scores=(0.8, 0.9, 0.85),
    relu_scores=(0.5, 0.6, 0.7), hardness=None, **fields,
):  # fmt: skip
    """A record with round numbers; `hardness` is one {site: λ} per epoch."""
    from lgelu_lab.studies.records import EpochRecord, RunRecord

    hardness = hardness or [{} for _ in scores]
    epochs = tuple(
        EpochRecord(
            epoch=float(index + 1), score=score, loss=1.0, relu_score=relu, relu_loss=None if relu is None else 1.0,
            relu_max_logit_change=None if relu is None else 0.25 * (index + 1),
            relu_unchanged_predictions=None if relu is None else 0.5, hardness=path,
        )
        for index, (score, relu, path) in enumerate(zip(scores, relu_scores, hardness, strict=True))
    )  # fmt: skip
    record = RunRecord(
        name=f"{benchmark}/{activation}-seed{seed}", created="2026-01-01T00:00:00+00:00", seconds=1.0,
        config={
            "benchmark": benchmark, "activation": activation, "init_mode": init_mode, "harden": harden, "seed": seed,
            "train_batch_size": 64, "optim": "sgd", "learning_rate": 0.05,
        },
        data={"train_samples": 100, "eval_samples": 50, "eval_split": "test", "source": "x"}, model={},
        metric="accuracy", greater_is_better=True,
        initial_hardness={site: 1.0 for site in hardness[0]}, epochs=epochs,
        versions={"torch": "1", "transformers": "2"},
        hardware={"cpu": "abacus", "cpu_cores": 1, "accelerators": [], "processes": 1, "threads_per_process": 1},
    )  # fmt: skip
    return dataclasses.replace(record, **fields)


def pytest_collection_modifyitems(items):
    """The files of this folder come first: they take longest, and no worker waits at the end for a late one."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Quicker for small networks, and two workers do not fight for two cores."""
    if "torch" in sys.modules:  # else nothing that was collected needs it
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def same_start():
    """Random numbers and threads do not depend on the tests that ran before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def host_log(caplog):
    """The log, including what transformers says; its loggers do not propagate."""
    host = logging.getLogger("transformers")
    level = host.level  # a study that ran in this process has left it at ERROR
    host.setLevel(logging.WARNING)
    host.addHandler(caplog.handler)
    yield caplog
    host.removeHandler(caplog.handler)
    host.setLevel(level)


@pytest.fixture(scope="session")
def record_of():
    return make_record
