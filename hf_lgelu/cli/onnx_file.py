"""An ONNX file in the place of a checkpoint, and its rows: arrays by the names of its inputs, or pictures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_lgelu.cli.arguments import OutputArguments
from hf_lgelu.cli.checkpoint import Checkpoint
from hf_lgelu.cli.command import say
from hf_lgelu.cli.inputs import InputSet, sample_numbers
from hf_lgelu.environment import require
from hf_lgelu.export.int8 import INT8_FILE
from hf_lgelu.export.onnx_network import OnnxNetwork
from hf_lgelu.export.onnx_run import OnnxModel
from hf_lgelu.export.quantize import quantize_onnx
from hf_lgelu.files import whole_folder

_PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
_ROWS, _OF_PICTURES = 8192, 256  # if the user names no number
_OF_CHECKPOINTS = (
    *("trust_remote_code", "column", "pair_column", "label_column", "sequence_length", "data_config"),
    *("evaluation_split", "evaluation_config", "original", "allow_worse", "opset"),
)


def read_onnx_file(arguments: Any) -> tuple[Checkpoint, InputSet, InputSet | None]:
    """(the file, the rows of --data, the rows of --evaluation). Raises ValueError for what does not fit the file."""
    _check_options(arguments)
    inputs = read_arrays(arguments.data, arguments, arguments.max_samples)
    second = None
    if arguments.evaluation not in (None, "none"):
        second = read_arrays(arguments.evaluation, arguments, arguments.max_eval_samples)
    return Checkpoint(arguments.model, OnnxNetwork(arguments.model, inputs.first(len(inputs)))), inputs, second


def quantize_file(arguments: Any) -> Any:
    """Write an int8 version of a file into a folder, judged against it on the rows of --data. Returns the report."""
    if arguments.to != "int8":
        raise ValueError(
            "of an ONNX file, export makes only --to int8; hf-lgelu convert puts ReLU in its gates' places"
        )
    _check_options(arguments)
    rows = read_arrays(arguments.data, arguments, arguments.max_samples)
    with whole_folder(arguments.output_dir, overwrite=arguments.overwrite) as new:
        batches = rows.batches("int8", progress=arguments.progress, batch_size=_batch_of(arguments.model) or 32)
        report = quantize_onnx(arguments.model, new / INT8_FILE, batches, operations=arguments.operations)
    report = replace(report, path=Path(arguments.output_dir) / INT8_FILE)  # not the hidden folder, written first
    say(str(report))
    return report


def _batch_of(path: str) -> int | None:
    sizes = {shape[0] for shape in OnnxModel(path).input_shapes.values() if shape}
    return next((size for size in sizes if isinstance(size, int)), None)


def _check_options(arguments: Any) -> None:
    given = [f"--{name}" for name in _OF_CHECKPOINTS if getattr(arguments, name, None)]
    given += ["--data_split"] * (arguments.data_split not in (None, "train"))
    if given:
        raise ValueError(f"{' and '.join(given)}: an ONNX file does not take that; leave it out")
    if arguments.data is None:
        raise ValueError("an ONNX file needs --data: a folder of pictures, or arrays in an .npz or .npy file")
    sets = (arguments.data, arguments.evaluation)
    are_pictures = any(name is not None and Path(name).expanduser().is_dir() for name in sets)
    if arguments.of_pictures and not are_pictures:  # who gives --mean to arrays takes them for pixels from 0 to 1
        raise ValueError(f"{arguments.of_pictures}: only pictures take that; give arrays as the network takes them")
    if are_pictures and (arguments.mean, arguments.std) == ("0", "1"):
        say("The pictures have pixels from 0 to 1. If the network was trained otherwise, give --mean and --std.")


def read_arrays(name: str, arguments: OutputArguments, wanted: int | None) -> InputSet:
    """The rows of an .npz file (arrays by the names of the inputs), an .npy file (one input) or a folder of pictures.

    Raises ValueError for other data, and for arrays that do not fit the inputs of the file.
    """
    path, shapes = Path(name).expanduser(), OnnxModel(arguments.model).input_shapes
    if path.is_dir() and len(shapes) == 1:
        ((input_name, shape),) = shapes.items()
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _PICTURES)
        chosen = sample_numbers(len(files), wanted or _OF_PICTURES, arguments.seed)
        if not files:
            raise ValueError(f"{path} holds no picture ({', '.join(_PICTURES)})")
        tensors = {input_name: torch.stack([_picture(files[number], shape, arguments) for number in chosen])}
        available = len(files)
    elif path.suffix in (".npz", ".npy"):
        found = np.load(path)
        arrays = dict(found) if path.suffix == ".npz" else dict.fromkeys(list(shapes)[:1], found)
        lengths = {array.shape[:1] for array in arrays.values()}
        if {*arrays} != {*shapes} or len(lengths) > 1 or () in lengths:
            held = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise ValueError(
                f"{path} must hold {', '.join(shapes)}, and nothing else, with one entry a row in each; it holds {held}"
            )
        available = len(next(iter(arrays.values())))
        chosen = sample_numbers(available, wanted or _ROWS, arguments.seed)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array[chosen])) for name, array in arrays.items()}
    else:
        raise ValueError(
            f"{path} cannot be read as rows of {arguments.model}, which takes {', '.join(shapes)}: give an .npz file "
            "with an array for each input, an .npy file for the only input, or a folder of pictures for an image"
        )
    description = path.resolve().name
    if path.is_dir():  # nothing tells a wrong mean: both networks are wrong alike
        description += f" (pixels from 0 to 1, mean {arguments.mean}, std {arguments.std})"
    return InputSet.of_tensors(tensors, len(chosen) == available, description)


def _of_channels(arguments: Any, name: str, channels: int) -> Tensor:
    """The numbers of --mean or --std: one for each channel, or one for all."""
    given, above = getattr(arguments, name), " above 0" if name == "std" else ""
    try:
        numbers = [float(part) for part in given.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, channels) or (above and min(numbers) <= 0):
        raise ValueError(
            f"--{name} takes a number{above} for each of {channels} channels, or one for all; it got {given}"
        )
    return torch.tensor(numbers)


def _picture(file: Path, shape: list[Any], arguments: Any) -> Tensor:
    """A picture as an input of this shape (N, C, H, W) or (N, H, W, C): resized, from 0 to 1, normalized."""
    image_module = require("PIL.Image", "benchmarks")
    is_last = len(shape) == 4 and shape[1] not in (1, 3)
    if len(shape) != 4 or shape[3 if is_last else 1] not in (1, 3):
        raise ValueError(f"{arguments.model} takes no picture, but {shape}; give its rows in an .npz or .npy file")
    sides = [each if isinstance(each, int) else arguments.image_size for each in (shape[1:3] if is_last else shape[2:])]
    if None in sides:
        raise ValueError(f"{arguments.model} takes pictures of any size; give --image_size, such as 640")
    mode = "L" if shape[3 if is_last else 1] == 1 else "RGB"
    with image_module.open(file) as opened:
        pixels = np.asarray(opened.convert(mode).resize(sides[::-1], image_module.Resampling.BILINEAR), np.float32)
    channels = torch.from_numpy(pixels).reshape(*sides, -1) / 255
    mean, deviation = (_of_channels(arguments, name, channels.shape[-1]) for name in ("mean", "std"))
    channels = (channels - mean) / deviation
    return channels if is_last else channels.permute(2, 0, 1).contiguous()
