"""The finished layers of a conversion on disk: a killed conversion goes on behind its last whole layer.

The folder holds the mark of the conversion, and a file for each layer that is done: the tensors that the layer changed,
its row of the report, and the digest of the mark. Values carried from layer to layer are not written: a forward pass of
both networks gives the same bits again. The network of "distill" is written after its last step.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from hf_lgelu.files import hold
from hf_lgelu.models.batches import TRIED
from hf_lgelu.models.config_keys import pretrained_roots
from hf_lgelu.models.outputs import allowed_rounding, compared_outputs
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.plan import Plan
from hf_lgelu.refit.processes import each_has, main_decides
from hf_lgelu.refit.report import LayerRefit
from hf_lgelu.version import __version__

_MARK, _LOCK = "conversion.json", "lock"
_NUMBERS_OF_AN_OUTPUT = 64


@contextmanager
def work_in(model: nn.Module, folds: Folds, plan: Plan, config: ConversionConfig) -> Iterator["Work"]:
    """The finished work of a conversion in its `checkpoint_dir`; without a folder, nothing is kept.

    A missing folder is made. No other conversion can use the folder inside the block. All processes of the conversion
    name the same folder, and the main process writes.

    Raises ValueError for a folder that holds something else, FileExistsError for a file, and BlockingIOError for a
    folder that is in use.
    """
    if config.checkpoint_dir is None:
        yield RungWork
        return
    path, mark, refusal = Path(config.checkpoint_dir), _mark(model, folds, plan, config), None
    with ExitStack() as lock:
        if PartialState().is_main_process:
            try:
                _open(path, mark, lock)
            except (ValueError, OSError) as error:
                refusal = error
        refusal = main_decides(refusal)  # otherwise the other processes would wait forever
        if refusal is not None:
            raise refusal
        views = each_has({entry.name for entry in path.iterdir()} if path.is_dir() else set())
        if any(view != views[0] for view in views):  # they would do different work
            raise ValueError(
                f"checkpoint_dir: the processes do not see the same files in {path}, and all must share it; give a "
                "folder that they do, or try again where they get to see files late"
            )
        yield partial(RungWork, folder=path, there=views[0], fingerprint=mark["fingerprint"])


def forget_work(folder: str | os.PathLike) -> None:
    """Remove a folder of `work_in`; any other folder stays."""
    if (Path(folder) / _MARK).is_file():
        shutil.rmtree(folder)


Work = Callable[[str], "RungWork"]
"""The finished layers of a rung, by its name."""


class RungWork:
    """The finished layers of a rung: `done` of them when the rung begins, then each layer that is saved."""

    def __init__(
        self, effort: str, folder: Path | None = None, there: Set[str] = frozenset(), fingerprint: str = ""
    ) -> None:
        self._effort, self._folder, self._fingerprint = effort, folder, fingerprint
        self._versions: dict[str, int] = {}
        self.done = 0
        while self._name(self.done) in there:
            self.done += 1

    def begin(self, converted: nn.Module) -> None:
        """Note the state of the network before the first layer."""
        self._versions = {name: tensor._version for name, tensor in _tensors(converted).items()}

    def save(self, index: int, converted: nn.Module, layer: LayerRefit | None) -> None:
        """Write the tensors that have changed since the layer before: a whole file or none."""
        if self._folder is None:
            return
        before = self._versions
        self.begin(converted)
        if PartialState().is_main_process:
            changed = {
                name: tensor.detach().cpu().clone().contiguous()
                for name, tensor in _tensors(converted).items()
                if self._versions[name] != before.get(name)  # torch counts the changes in place, also through views
            }
            row = json.dumps(None if layer is None else asdict(layer))
            told = {"layer": row, "fingerprint": self._fingerprint}
            _write(self._folder / self._name(index), save(changed, told))

    @torch.no_grad()
    def restore(self, index: int, converted: nn.Module) -> LayerRefit | None:
        """The report's row of a finished layer, whose tensors are written into `converted` in place."""
        path, held = Path(self._folder or "", self._name(index)), _tensors(converted)
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                held[name].copy_(file.get_tensor(name))
            layer = json.loads(file.metadata()["layer"])
        self.begin(converted)
        return None if layer is None else LayerRefit.from_dict(layer)

    def _name(self, index: int) -> str:
        return f"{self._effort}-{index:05d}.safetensors"


def _open(path: Path, mark: dict[str, Any], lock: ExitStack) -> None:
    """Lock the folder, and put the mark there, unless there is something else."""
    path.mkdir(parents=True, exist_ok=True)
    # A killed call may leave the lock and a half-written mark: neither holds work.
    there = {entry.name for entry in path.iterdir()} - {_LOCK, _new(path / _MARK).name}
    if there and _MARK not in there:
        raise ValueError(f"checkpoint_dir: {path} holds something else; give a folder of the conversion's own")
    held = hold(path / _LOCK)
    if held is not None:
        lock.callback(os.close, held)
    if there and not _is_mark(json.loads((path / _MARK).read_text(encoding="utf-8")), mark):
        raise ValueError(
            f"checkpoint_dir: {path} has the work of a conversion of another model, on other inputs or with other "
            f"arguments, or of another number of processes than {PartialState().num_processes}; give another "
            "folder, or delete it"
        )
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as layer:
                told = layer.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"checkpoint_dir: {file} is damaged; delete it and try again") from error
        if told.get("fingerprint") != mark["fingerprint"]:
            raise ValueError(f"checkpoint_dir: {file} is a layer of another conversion; give another folder")
    _write(path / _MARK, json.dumps(mark).encode())


def _mark(model: nn.Module, folds: Folds, plan: Plan, config: ConversionConfig) -> dict[str, Any]:
    """A digest of all that decides a conversion (weights, structure, config, inputs in their order, arguments), and for
    each output the rounding that is allowed and some of its numbers.

    Outputs also depend on what no digest sees: attributes that are not tensors, changed code, hooks.
    """
    configs = [{**root.config.to_dict(), "_name_or_path": None} for _, root in pretrained_roots(model)]
    batches = [[(batch.numbers, sorted(batch.lengths.items())) for batch in fold] for fold in folds.folds]
    arguments = plan.kinds, plan.keep, plan.target, config.outputs, config.width
    told = (__version__, torch.__version__, PartialState().num_processes, repr(model), configs, batches, arguments)
    digest = blake2b(repr(told).encode() + b"".join(folds.samples.keys), digest_size=16)
    for name, tensor in _tensors(model).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    given = compared_outputs(model, folds.first.load()[:TRIED].inputs, config.outputs).tensors.values()
    some = [[allowed_rounding(value), *value.reshape(-1)[:_NUMBERS_OF_AN_OUTPUT].tolist()] for value in given]
    return {"fingerprint": digest.hexdigest(), "outputs": some}


def _is_mark(found: dict[str, Any], mark: dict[str, Any]) -> bool:
    """Whether a mark is that of the same conversion; its outputs may differ by rounding, as with other threads."""
    if found.get("fingerprint") != mark["fingerprint"] or [*map(len, found["outputs"])] != [*map(len, mark["outputs"])]:
        return False
    pairs = zip(map(torch.tensor, found["outputs"]), map(torch.tensor, mark["outputs"]), strict=True)
    return all(torch.allclose(one[1:], two[1:], rtol=0, atol=one[0].item(), equal_nan=True) for one, two in pairs)


def _write(path: Path, content: bytes) -> None:
    _new(path).write_bytes(content)
    os.replace(_new(path), path)


def _new(path: Path) -> Path:
    """The path at which a file is written before it is renamed."""
    return path.with_suffix(".new")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
