import dataclasses
import functools
import gc
import os
import sys
from pathlib import Path

import fresh_process
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    fresh_process.start_server(fork=True)  # before another conftest imports hf_lgelu


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


@pytest.fixture(autouse=True, scope="module")
def what_stays_is_not_collected():
    """Trainer.train() and timers collect garbage first, and looking through all of torch takes longer than they do.

    What is left of a module's tests is frozen with it: a second is spent once a module, not once a run.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """The files beside this one first: they take longest, and no worker waits at the end for one that began late."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def pytest_sessionstart():
    gc.set_threshold(100_000, 20)  # a trace makes many objects that stay: looking for it took a seventh of all time


def pytest_sessionfinish():
    gc.unfreeze()  # else extensions complain at the interpreter's end of what they see left


class _NoTraceback:
    @classmethod
    def extract(cls):
        return cls()

    def summary(self):
        return None


@pytest.fixture(autouse=True, scope="session")
def torch_does_what_tests_need():
    """One thread, quicker for small networks; and sources that torch reads at each export to ONNX are read once."""
    if "torch" not in sys.modules:  # of what was collected nothing needs it
        yield
        return
    import torch.fx._lazy_graph_module
    import torch.fx.proxy
    from torch._export import utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        patch.setattr(utils, "_materialize_cpp_cia_ops", functools.cache(utils._materialize_cpp_cia_ops))
        # A trace keeps with each operation where it was called, and torch.manual_seed has each kind of device that is
        # not there remember the call: of both stacks nobody reads a line.
        patch.setattr(torch.fx.proxy, "CapturedTraceback", _NoTraceback)
        # Nor does anybody run the code of a trace, which torch writes anew after each of its passes.
        patch.setattr(torch.fx._lazy_graph_module, "_use_lazy_graph_module_flag", True)
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            if not devices.is_available():
                patch.setattr(devices, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def render():
    """To render a picture takes a third of a second: a file has its first bytes alone, and pixels in memory are few.

    Yields what renders.
    """
    from matplotlib.figure import Figure

    savefig = Figure.savefig

    def quick(figure, to, **options):
        return to.write_bytes(b"\x89PNG") if isinstance(to, Path) else savefig(figure, to, **options | {"dpi": 15})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", quick)
        yield savefig


@pytest.fixture
def rendered(render, monkeypatch):
    """Of tests that look at a picture."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", render)


@pytest.fixture(scope="session")
def record_of():
    return make_record
