"""`hf-lgelu convert model.onnx`, and the int8 file of its result."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from hf_lgelu import OnnxNetwork
from hf_lgelu.cli.command import main


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, 2, 1), nn.Linear(12, 4)

    def forward(self, images):
        return self.head(F.silu(self.b(F.silu(self.a(images)))).mean((2, 3)))


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    network = Small().eval()
    for each in (network.a, network.b, network.head):
        nn.init.normal_(each.weight, std=0.4)
    path = tmp_path / "net.onnx"
    torch.onnx.export(network, torch.zeros(1, 3, 16, 16), path, input_names=["images"], output_names=["scores"],
                      dynamic_axes={"images": {0: "n"}, "scores": {0: "n"}}, dynamo=False)  # fmt: skip
    return path


@pytest.fixture
def pictures(tmp_path):
    """80 pictures of two sizes in two folders, and their pixels as the network takes them."""
    made, draws = [], np.random.default_rng(0)
    for number in range(80):
        folder = tmp_path / "pictures" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (16, 16, 3), np.uint8)
        pixels = pixels.repeat(1 + number % 2, 0).repeat(1 + number % 2, 1)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")
        made.append((pixels[:: 1 + number % 2, :: 1 + number % 2] / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.25, 0.3])
    return tmp_path / "pictures", np.stack(made).transpose(0, 3, 1, 2).astype(np.float32)


def scores(path, rows):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.tensor(session.run(None, {session.get_inputs()[0].name: rows})[0])


def nearness(file, folder, rows):
    """(KL of the written file to the original, KL of the file with Relu and the old weights)."""
    model = onnx.load(file)
    swapped = OnnxNetwork(file, torch.tensor(rows))
    for name in swapped._gates:
        swapped.graph.set_submodule(name, nn.ReLU())
    before, after = scores(file, rows).log_softmax(-1), scores(folder / "model.onnx", rows).log_softmax(-1)
    assert [node.op_type for node in model.graph.node].count("Sigmoid") == 2
    direct = swapped(torch.tensor(rows)).detach().log_softmax(-1)
    return [float(F.kl_div(each, before, log_target=True, reduction="batchmean")) for each in (after, direct)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pictures_and_arrays_convert_a_file(file, pictures, tmp_path, capsys):
    folder, rows = pictures
    options = ["--mean", "0.5,0.4,0.3", "--std", "0.2,0.25,0.3", "--evaluation", str(folder / "1")]
    assert main(["convert", str(file), "--data", str(folder), "--output_dir", f"{tmp_path}/out", *options]) == 0
    said = capsys.readouterr().out
    assert "2 gates (SiLUActivation) became ReLU" in said
    assert "give --mean and --std" not in said
    after, direct = nearness(file, tmp_path / "out", rows)
    assert after < 0.2 * direct
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.onnx",
        "README.md",
        "report.json",
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: onnx" in card
    assert 'InferenceSession("FOLDER/model.onnx")' in card
    assert json.loads((tmp_path / "out" / "report.json").read_text())["provenance"]["data"] == (
        "pictures (pixels from 0 to 1, mean 0.5,0.4,0.3, std 0.2,0.25,0.3)"
    )

    np.savez(tmp_path / "rows.npz", images=rows)
    np.save(tmp_path / "rows.npy", rows)
    found = []
    for name in ("rows.npz", "rows.npy"):
        call = ["convert", str(file), "--data", f"{tmp_path}/{name}", "--output_dir", f"{tmp_path}/out", "--overwrite"]
        assert main(call) == 0
        found.append(nearness(file, tmp_path / "out", rows)[0])
    assert found[0] == found[1]
    assert found[0] == pytest.approx(after, rel=0.5)  # the same rows in another order
    assert main([*call[:-2], f"{tmp_path}/dry", "--dry_run"]) == 0
    assert not (tmp_path / "dry").exists()

    assert main(["export", f"{tmp_path}/out", "--to", "onnx", "--output_dir", f"{tmp_path}/int8"]) == 1
    assert f"Give its ONNX network by name, {tmp_path}/out/model.onnx" in capsys.readouterr().err
    call = ["export", f"{tmp_path}/out/model.onnx", "--to", "int8", "--data", f"{tmp_path}/rows.npz"]
    for words in ([], ["--overwrite"]):
        assert main([*call, *words, "--output_dir", f"{tmp_path}/int8"]) == 0
    assert "relative error" in capsys.readouterr().out
    change = scores(tmp_path / "int8" / "model-int8.onnx", rows) - scores(tmp_path / "out" / "model.onnx", rows)
    assert 0 < change.square().mean() < 0.05 * scores(file, rows).var()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "an ONNX file needs --data"),
        (
            ["--data", "rows.npz"],
            r"must hold images, and nothing else, with one entry a row in each; it holds other \(20, 3, 16, 16\)",
        ),
        (["--data", "rows.csv"], r"cannot be read as rows of .*net.onnx, which takes images"),
        (["--data", "empty"], "holds no picture"),
        (["--data", "one", "--mean", "0.5,0.5"], "--mean takes a number for each of 3 channels, or .* got 0.5,0.5"),
        (["--data", "one", "--mean", "a,b,c"], "--mean takes a number for each of 3 channels, or .* got a,b,c"),
        (["--data", "one", "--std", "0"], "--std takes a number above 0 for each of 3 channels, or .* got 0"),
        (["--data", "rows.npz", "--mean", "0.5", "--image_size", "8"], "--mean and --image_size: only pictures take"),
        (["--data", "rows.npz", "--data_split", "test"], "--data_split: an ONNX file does not take that"),
        (["--data", "number.npy"], r"must hold images, .* it holds images \(\)"),
        (["--data", "rows.npz", "--column", "text"], "--column: an ONNX file does not take that"),
        (["--data", "missing.npz"], "there is no folder or file missing.npz"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_does_not_fit_a_file_is_refused(file, tmp_path, monkeypatch, capsys, options, words):
    import re

    monkeypatch.chdir(tmp_path)
    np.savez("rows.npz", other=np.zeros((20, 3, 16, 16), np.float32))
    np.save("number.npy", 1.0)
    (tmp_path / "rows.csv").write_text("a\n1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "one").mkdir()
    Image.new("RGB", (16, 16)).save("one/picture.png")
    assert main(["convert", str(file), *options, "--output_dir", "out"]) != 0
    assert re.search(words, capsys.readouterr().err)
    assert main(["export", str(file), "--output_dir", "out"]) != 0
    assert "of an ONNX file, export makes only --to int8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
