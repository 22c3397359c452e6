"""The finished layers of a conversion on disk: a killed conversion goes on after its last whole layer.

The folder holds the fingerprint of the conversion, and a file for each layer that is done: the tensors that the layer
changed, its row of the report, a digest of both, and the fingerprint. Values carried from layer to layer are not
written: a forward pass of both networks gives the same bits again. The network of "distill" is written after its last
step.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from hf_lgelu.files import hold, own_folder, whole_file
from hf_lgelu.models.config_keys import config_entries, pretrained_roots
from hf_lgelu.processes import each_has, main_decides
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.report import LayerRefit
from hf_lgelu.refit.task import Exchange, Work
from hf_lgelu.version import __version__

_MARK, _LOCK = "conversion.txt", "lock"


@contextmanager
def work_in(
    path: Path, model: nn.Module, folds: Folds, exchange: Exchange, config: ConversionConfig
) -> Iterator[Callable[[str], "KeptWork"]]:
    """A block with a function from a rung's name to its finished work in the conversion's `checkpoint_dir`.

    A missing folder is made. No other conversion can use the folder inside the block. All processes of the conversion
    name the same folder, and the main process writes.

    Raises ValueError for a folder that holds something else, PermissionError for a link or another user's folder,
    FileExistsError for a file, and BlockingIOError for a folder that is in use.
    """
    fingerprint, refusal = _fingerprint(model, folds, exchange, config), None
    with ExitStack() as lock:
        if PartialState().is_main_process:
            try:
                _open(path, fingerprint, lock)
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
        yield partial(KeptWork, folder=path, there=views[0], fingerprint=fingerprint)


def forget_work(folder: str | os.PathLike) -> None:
    """Remove a folder of `work_in`; any other folder stays."""
    if (Path(folder) / _MARK).is_file():
        shutil.rmtree(folder)


class KeptWork(Work):
    """The finished layers of a rung: `done` of them when the rung begins, then each layer that is saved."""

    def __init__(self, effort: str, folder: Path, there: Set[str], fingerprint: str) -> None:
        super().__init__(effort)
        self._folder, self._fingerprint = folder, fingerprint
        self._versions: dict[str, int] = {}
        while self._name(self.done) in there:
            self.done += 1

    def begin(self, converted: nn.Module) -> None:
        self._versions = {name: tensor._version for name, tensor in _tensors(converted).items()}

    def save(self, index: int, converted: nn.Module, layer: LayerRefit | None) -> None:
        """Write the tensors that have changed since the layer before: a whole file or none."""
        before = self._versions
        self.begin(converted)
        if PartialState().is_main_process:
            changed = {
                name: tensor.detach().cpu().clone().contiguous()
                for name, tensor in _tensors(converted).items()
                if self._versions[name] != before.get(name)  # torch counts changes in place, also through views
            }
            row = json.dumps(None if layer is None else asdict(layer))
            digest = _digest(row.encode(), sorted(changed.items()))
            told = {"layer": row, "fingerprint": self._fingerprint, "digest": digest}
            with whole_file(self._folder / self._name(index), overwrite=True) as new:
                new.write_bytes(save(changed, told))

    @torch.no_grad()
    def restore(self, index: int, converted: nn.Module) -> LayerRefit | None:
        held = _tensors(converted)
        with safe_open(self._folder / self._name(index), "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                held[name].copy_(file.get_tensor(name))
            row = json.loads(file.metadata()["layer"])
        self.begin(converted)
        if row is None:
            return None
        return LayerRefit(**{**row, "layers": tuple(row["layers"]), "sites": tuple(row["sites"])})

    def _name(self, index: int) -> str:
        return f"{self.effort}-{index:05d}.safetensors"


def _open(path: Path, fingerprint: str, lock: ExitStack) -> None:
    """Lock the folder and write the fingerprint into it, or raise if the folder holds something else."""
    # A killed call may leave the lock and hidden folders of unfinished files; neither of them holds work.
    left = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    there = {name for name in left if name != _LOCK and not name.endswith(".hf_lgelu")}
    if there and _MARK not in there:
        raise ValueError(f"checkpoint_dir: {path} holds something else; give a folder of the conversion's own")
    own_folder(path)
    held = hold(path / _LOCK)
    if held is not None:
        lock.callback(os.close, held)
    found: set[str | None] = {(path / _MARK).read_text(encoding="utf-8")} if there else set()
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, "pt") as layer:
                told = layer.metadata() or {}
                found.add(told.get("fingerprint"))
                tensors = ((name, layer.get_tensor(name)) for name in sorted(layer.keys()))
                is_whole = found != {fingerprint} or told["digest"] == _digest(told["layer"].encode(), tensors)
        except SafetensorError:
            is_whole = False
        if not is_whole:
            raise ValueError(f"checkpoint_dir: {file} is damaged; delete it and try again")
    if found - {fingerprint}:
        raise ValueError(
            f"checkpoint_dir: {path} has the work of a conversion of another model, on other inputs or with other "
            f"arguments, or of another number of processes than {PartialState().num_processes}; give another "
            "folder, or delete it"
        )
    with whole_file(path / _MARK, overwrite=True) as new:
        new.write_text(fingerprint, encoding="utf-8")


def _fingerprint(model: nn.Module, folds: Folds, exchange: Exchange, config: ConversionConfig) -> str:
    """A digest of all that decides a conversion: weights, structure, config, inputs in their order, arguments.

    Changed code, hooks and attributes of modules that are no tensors do not change the digest.
    """
    configs = [[*config_entries(root.config)] for _, root in pretrained_roots(model)]
    batches = [[(batch.numbers, sorted(batch.lengths.items())) for batch in fold] for fold in folds.folds]
    counted = config.outputs, config.box_channels
    arguments = exchange.kinds, exchange.keep, exchange.target, *counted, config.width
    told = (__version__, torch.__version__, PartialState().num_processes, repr(model), configs, batches, arguments)
    return _digest(repr(told).encode() + b"".join(folds.samples.keys), _tensors(model).items())


def _digest(told: bytes, tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = blake2b(told, digest_size=16)
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
