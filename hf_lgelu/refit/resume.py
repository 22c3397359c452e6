"""The finished layers of a conversion on disk: a killed conversion goes on behind its last whole layer.

After each layer, the tensors that the layer changed are written, with the layer's row of the report. Values carried
from layer to layer are not written: a forward pass of both networks gives the same bits again. The network of
"distill" is written after its last step.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
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

_MARK = "conversion.json"
_LOCK = "lock"
_NUMBERS_OF_AN_OUTPUT = 64


def fingerprint(model: nn.Module, folds: Folds, *arguments: Any) -> str:
    """A digest of all that decides a conversion: weights, structure, config, inputs in their order, arguments."""
    digest = blake2b(digest_size=16)
    configs = [{**root.config.to_dict(), "_name_or_path": None} for _, root in pretrained_roots(model)]
    batches = [[(batch.numbers, sorted(batch.lengths.items())) for batch in fold] for fold in folds.folds]
    told = (__version__, torch.__version__, PartialState().num_processes, repr(model), configs, batches, arguments)
    digest.update(repr(told).encode())
    for key in folds.samples.keys:
        digest.update(key)
    for name, tensor in _tensors(model).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class Mark(NamedTuple):
    """The mark of a conversion in its folder: a `fingerprint`, and the model's outputs for the first inputs.

    The outputs also depend on what a fingerprint does not see: attributes that are not tensors, changed code, hooks.
    They are compared up to rounding, which differs with the number of threads.
    """

    fingerprint: str
    outputs: list[list[float]]

    @classmethod
    def of(cls, model: nn.Module, folds: Folds, plan: Plan, config: ConversionConfig) -> "Mark":
        """The mark of a conversion; for each output, the allowed rounding and then some of its numbers."""
        given = compared_outputs(model, folds.first.load()[:TRIED].inputs, config.outputs).tensors.values()
        told = [[allowed_rounding(value), *value.reshape(-1)[:_NUMBERS_OF_AN_OUTPUT].tolist()] for value in given]
        gates, options = (plan.kinds, plan.keep, plan.target), (config.outputs, config.width, config.allow_unrefitted)
        return cls(fingerprint(model, folds, gates, options), told)

    def is_in(self, file: Path) -> bool:
        """Whether the file holds the mark of this conversion."""
        try:
            other = Mark(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):  # of an earlier version
            return False
        if other.fingerprint != self.fingerprint or list(map(len, other.outputs)) != list(map(len, self.outputs)):
            return False
        pairs = zip(map(torch.tensor, other.outputs), map(torch.tensor, self.outputs), strict=True)
        return all(torch.allclose(one[1:], two[1:], rtol=0, atol=one[0].item(), equal_nan=True) for one, two in pairs)


class Work:
    """The rungs of one conversion in a folder; without a folder, nothing is kept."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def rung(self, effort: str) -> "RungWork":
        """The finished layers of a rung."""
        return RungWork(self._folder, effort)


@contextmanager
def work_in(model: nn.Module, folds: Folds, plan: Plan, config: ConversionConfig) -> Iterator[Work]:
    """The finished work of a conversion in its `checkpoint_dir`; without a folder, nothing is kept.

    A missing folder is made. No other conversion can use the folder inside the block. All processes of the conversion
    name the same folder, and the main process writes.

    Raises ValueError for a folder that holds something else, and BlockingIOError for a folder that is in use.
    """
    if config.checkpoint_dir is None:
        yield Work()
        return
    mark = Mark.of(model, folds, plan, config)
    path, lock, refusal = Path(config.checkpoint_dir), None, None
    if PartialState().is_main_process:
        try:
            lock = _opened(path, mark)
        except (ValueError, OSError) as error:
            refusal = error
    try:
        refusal = main_decides(refusal)  # otherwise the other processes would wait forever
        if refusal is not None:
            raise refusal
        _require_shared(path, (path / _MARK).is_file())
        yield Work(path)
    finally:
        if lock is not None:
            os.close(lock)


def _require_shared(folder: Path, seen: Any) -> None:
    """Raise ValueError on every process if the processes see different files: they would do different work."""
    views = each_has(seen)
    if any(view != views[0] for view in views):
        raise ValueError(
            f"checkpoint_dir: the processes do not see the same files in {folder}, and all must share it; give a "
            "folder that they do, or try again where they get to see files late"
        )


def _opened(path: Path, mark: Mark) -> int | None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"checkpoint_dir: {path} is a file; give a folder")
    path.mkdir(parents=True, exist_ok=True)
    # A killed call may leave the lock and a half-written mark: neither holds work.
    there = {entry.name for entry in path.iterdir()} - {_LOCK, _new(path / _MARK).name}
    if there and _MARK not in there:
        raise ValueError(f"checkpoint_dir: {path} holds something else; give a folder of the conversion's own")
    lock = hold(path / _LOCK)
    try:
        if _MARK in there and not mark.is_in(path / _MARK):
            raise ValueError(
                f"checkpoint_dir: {path} has the work of a conversion of another model, on other inputs or with other "
                f"arguments, or of another number of processes than {PartialState().num_processes}; give another "
                "folder, or delete it"
            )
        _written(path / _MARK, lambda file: file.write_text(json.dumps(mark._asdict()), encoding="utf-8"))
    except BaseException:
        if lock is not None:
            os.close(lock)
        raise
    return lock


def forget_work(folder: str | os.PathLike) -> None:
    """Remove a folder of `work_in`; any other folder stays."""
    if (Path(folder) / _MARK).is_file():
        shutil.rmtree(folder)


class RungWork:
    """The finished layers of a rung: `done` of them when the rung begins, then each layer that is saved."""

    def __init__(self, folder: Path | None = None, effort: str = "") -> None:
        self._folder, self._effort = folder, effort
        self._known: dict[str, tuple[Tensor, int]] = {}
        self.done = 0
        while folder is not None and self._file(self.done).is_file():
            self.done += 1
        if folder is not None:
            _require_shared(folder, self.done)

    def begin(self, converted: nn.Module) -> None:
        """Note the state of the network before the first layer."""
        if self._folder is not None:
            self._known = _versions(converted)

    def save(self, index: int, converted: nn.Module, layer: LayerRefit | None) -> None:
        """Write the tensors that have changed since the layer before: a whole file or none."""
        if self._folder is None:
            return
        before, self._known = self._known, _versions(converted)
        if not PartialState().is_main_process:
            return
        changed = {
            name: tensor.detach().cpu().clone().contiguous()
            for name, (tensor, version) in self._known.items()
            if name not in before or before[name][0] is not tensor or before[name][1] != version
        }
        told = {"layer": json.dumps(None if layer is None else asdict(layer))}
        path = self._file(index)
        try:
            _written(path, lambda file: save_file(changed, file, told))
        except SafetensorError as error:  # safetensors' name for an error of the system
            raise OSError(f"checkpoint_dir: {path} could not be written: {error}") from error

    @torch.no_grad()
    def restore(self, index: int, converted: nn.Module) -> LayerRefit | None:
        """The report's row of a finished layer, whose tensors are written into `converted` in place."""
        path, held = self._file(index), _tensors(converted)
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    held[name].copy_(file.get_tensor(name))
                layer = json.loads(file.metadata()["layer"])
        except SafetensorError as error:
            raise ValueError(f"checkpoint_dir: {path} is damaged; delete it and try again") from error
        self._known = _versions(converted)
        return None if layer is None else LayerRefit.from_dict(layer)

    def _file(self, index: int) -> Path:
        return Path(self._folder or "", f"{self._effort}-{index:05d}.safetensors")


def _written(path: Path, write: Any) -> None:
    new = _new(path)
    write(new)
    os.replace(new, path)


def _new(path: Path) -> Path:
    """The path at which a file is written before it is renamed."""
    return path.with_suffix(".new")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _versions(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Each tensor with the number of its changes in place, which views share."""
    return {name: (tensor, tensor._version) for name, tensor in _tensors(model).items()}
