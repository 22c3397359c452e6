"""ONNX files of tiny networks: the same numbers as torch in float64, at sizes that the exporter never saw."""

import os
import sys

import numpy as np
import onnx
import pytest
import small_networks as networks
import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast, default_data_collator

from hf_lgelu import export_int8, quantize_onnx
from hf_lgelu.export import onnx_export
from hf_lgelu.export.onnx_export import export_onnx
from hf_lgelu.export.onnx_run import OnnxModel, read_onnx
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

OPERATION = {"gelu": "Gelu", "lambda_gelu": "Erf", "relu": "Relu"}


def mlp(activation):
    torch.manual_seed(0)
    config = MLPConfig(num_features=5, hidden_size=7, num_hidden_layers=2, hidden_act=activation, num_labels=3)
    return MLPForClassification(config)


@pytest.fixture(scope="module", params=OPERATION)
def exported_mlp(request, tmp_path_factory):
    network = mlp(request.param).train()
    network.layers[0].eval()
    path = tmp_path_factory.mktemp("onnx") / "mlp.onnx"
    before = {name: value.clone() for name, value in network.state_dict().items()}
    example = torch.randn(1, 5)
    report = export_onnx(network, path, example)
    wanted = network.double().eval()(example.double()).logits.abs().max().item()
    assert report.largest_output == pytest.approx(wanted, rel=1e-5)
    network.float()
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    return request.param, network, report, path


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    model = networks.gpt2(n_embd=8, n_layer=1, vocab_size=31, activation_function="lambda_gelu")
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def exported_gpt2(gpt2, tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "gpt2.onnx"
    ids, mask = torch.randint(31, (3, 8)), torch.ones(3, 8, dtype=torch.int64)
    mask[0, :3] = 0  # padding, before and after the text
    mask[1, 6:] = 0
    return export_onnx(gpt2, path, {"input_ids": ids, "attention_mask": mask, "labels": ids}), path


def test_an_mlp_computes_what_float64_does_at_any_batch_size(exported_mlp):
    _, network, _, path = exported_mlp
    onnx_model = OnnxModel(path)
    assert onnx_model._session.get_session_options().intra_op_num_threads == 1
    for batch in (1, 2, 9):
        features = torch.randn(batch, 5)
        wanted = network.double().eval()(features.double()).logits.detach().numpy()
        network.float()
        (found,) = onnx_model({"features": features})
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_report_says_what_is_in_the_file(exported_mlp):
    activation, _, report, path = exported_mlp
    proto = onnx.load(path)
    assert [value.name for value in proto.graph.input] == ["features"]
    assert [value.name for value in proto.graph.output] == ["logits"]
    assert report.inputs == {"features": ("batch", 5)}
    assert report.outputs == ("logits",)
    assert proto.opset_import[0].version == report.opset == 20
    assert report.file_bytes == path.stat().st_size > 4 * (5 * 7 + 7 * 7 + 7 * 3)
    operations = [node.op_type for node in read_onnx(path).graph.node]
    assert operations.count(OPERATION[activation]) == 2
    assert 0 <= report.max_abs_difference < 1e-6
    assert report.other_shapes == ({"batch": 2}, {"batch": 3})
    assert [entry.name for entry in path.parent.iterdir()] == ["mlp.onnx"]
    told = str(report)
    assert told.startswith(f"{path}: ONNX opset 20, {report.file_bytes:,} bytes\n")
    assert "features (batch, 5) → logits" in told
    assert f"at most {report.max_abs_difference:.3g} of outputs up to {report.largest_output:.3g} on the" in told
    assert f"at batch 2 and batch 3: at most {report.other_shapes_max_abs_difference:.3g}" in told


def test_the_file_tells_nothing_of_where_it_was_made(exported_mlp, exported_gpt2):
    for path in (exported_mlp[3], exported_gpt2[1]):
        raw = path.read_bytes()
        for word in (
            b"stack_trace",
            b"pkg.torch",
            b".py",
            os.getcwd().encode(),
            os.path.expanduser("~").encode() + b"/",
        ):
            assert word not in raw, word


@pytest.mark.parametrize(("batch", "length"), [(1, 16), (5, 3), (2, 11)])
def test_gpt2_computes_what_float64_does_at_any_batch_size_and_length(gpt2, exported_gpt2, batch, length):
    report, path = exported_gpt2
    assert report.inputs == {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}
    ids, mask = torch.randint(31, (batch, length)), torch.ones(batch, length, dtype=torch.int64)
    mask[0, :2] = 0
    with torch.no_grad():
        wanted = gpt2.double().eval()(input_ids=ids, attention_mask=mask, use_cache=False).logits.numpy()
        unmasked = gpt2(input_ids=ids, use_cache=False).logits.numpy()
    gpt2.float()
    (found,) = OnnxModel(path)({"input_ids": ids, "attention_mask": mask})
    seen = mask.numpy() == 1
    np.testing.assert_allclose(found[seen], wanted[seen], atol=1e-4)
    assert np.abs(wanted[seen] - unmasked[seen]).max() > 1e-2  # the mask matters


@pytest.mark.parametrize("opset", [11, 17, *(pytest.param(opset, marks=pytest.mark.slow) for opset in (18, 25))])
def test_the_file_has_the_opset_that_was_asked_for(gpt2, tmp_path, opset):
    """Below 18 it is torch's older exporter, and below 14 attention in the operations that it is made of."""
    ids = torch.randint(31, (3, 8))
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    network, inputs = (mlp("gelu"), torch.randn(2, 5)) if opset >= 18 else (gpt2, tokens)
    report = export_onnx(network, tmp_path / "a.onnx", inputs, opset=opset)
    (version,) = {entry.version for entry in onnx.load(tmp_path / "a.onnx").opset_import if not entry.domain}
    assert version == report.opset == opset
    assert b".py" not in (tmp_path / "a.onnx").read_bytes()
    if opset < 18:
        assert gpt2.config._attn_implementation == "sdpa"
        longer = {name: torch.cat((value, value), 1)[:2, :11] for name, value in tokens.items()}
        wanted = gpt2.double().eval()(**longer, use_cache=False).logits.detach()
        gpt2.float()
        (found,) = OnnxModel(tmp_path / "a.onnx")(longer)
        torch.testing.assert_close(torch.from_numpy(found), wanted.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kept", [0, 10, -20])
def test_a_damaged_file_is_refused_by_its_path(exported_mlp, tmp_path, kept):
    whole = exported_mlp[3].read_bytes()
    (tmp_path / "half.onnx").write_bytes(whole[:kept] or b"")
    with pytest.raises(ValueError, match=r"half\.onnx"):
        OnnxModel(tmp_path / "half.onnx")
    (tmp_path / "text.onnx").write_bytes(b"\xff\xfenot a graph")
    with pytest.raises(ValueError, match=r"text\.onnx"):
        read_onnx(tmp_path / "text.onnx")


def test_training_flags_and_hooks_are_as_they_were(tmp_path):
    network = mlp("relu").train()
    network.layers[1].eval()
    flags = [module.training for module in network.modules()]
    with pytest.raises(RuntimeError, match="differs from torch"):
        export_onnx(network, tmp_path / "never.onnx", torch.randn(2, 5), tolerance=-1.0)
    assert [module.training for module in network.modules()] == flags
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert list(tmp_path.iterdir()) == []


class Pair(nn.Module):
    def forward(self, x, y):
        return x + y, x * 2


def test_tensors_inside_tuples_and_mappings_are_outputs_too(tmp_path):
    class Nested(nn.Module):
        def forward(self, x):
            return x + 1, (x * 2, [x + 3]), {"codes": x.argmax(-1), "none": None}

    x = torch.randn(3, 4)
    report = export_onnx(Nested(), tmp_path / "a.onnx", x)
    assert report.outputs == ("output_0", "output_1.0", "output_1.1.0", "output_2.codes")
    found = OnnxModel(tmp_path / "a.onnx")({"x": x})
    for given, wanted in zip(found, (x + 1, x * 2, x + 3, x.argmax(-1)), strict=True):
        np.testing.assert_array_equal(given, wanted.numpy())


def test_a_difference_on_another_batch_size_is_an_error_and_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.onnx"
    path.write_text("old")
    network = mlp("relu")
    with pytest.raises(FileExistsError, match="`overwrite`"):
        export_onnx(network, path, torch.randn(4, 5))
    real = onnx_export.OnnxModel.__call__

    error = 0.01

    def broken(self, inputs):
        found = real(self, inputs)
        return [f + error for f in found] if len(inputs["features"]) != 4 else found

    monkeypatch.setattr(onnx_export.OnnxModel, "__call__", broken)
    with pytest.raises(RuntimeError, match=r"0\.01.*logits.*\{'batch': 2\}"):
        export_onnx(network, path, torch.randn(4, 5), overwrite=True)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.onnx"]
    error = 5e-5
    report = export_onnx(network, path, torch.randn(4, 5), overwrite=True)
    assert report.max_abs_difference < 1e-6
    assert report.other_shapes_max_abs_difference == pytest.approx(5e-5, rel=0.1)


def too_large():
    with torch.device("meta"):
        return nn.Linear(2**15, 2**14 + 1)


ROWS, WIDE = torch.randn(2, 5), (torch.ones(2, 3), torch.ones(1, 3))
REFUSED = [
    (lambda: mlp("relu").half(), ROWS, {}, TypeError, r"float32.*float16"),
    (
        lambda: mlp("relu"),
        ROWS,
        {"dynamic_axes": {"x": {0: "batch"}}},
        ValueError,
        "features has 2 axes",
    ),
    (Pair, WIDE, {}, ValueError, "'batch' must have one size"),
    (lambda: mlp("relu"), ROWS, {"opset": 10}, ValueError, "opset.*11 to 25.* 10"),
    (lambda: mlp("relu"), ROWS, {"opset": 26}, ValueError, "opset.*11 to 25.* 26"),
    (lambda: mlp("relu"), ROWS.to("meta"), {}, TypeError, "dense tensors of numbers"),
    (lambda: mlp("relu"), ROWS.to_sparse(), {}, TypeError, "dense tensors of numbers"),
    (lambda: mlp("relu"), ROWS[:0], {}, ValueError, "at least one row|at least 1|N ≥ 1"),
    (lambda: mlp("relu"), ROWS * float("nan"), {}, (ValueError, RuntimeError), "NaN|by nan"),
    (too_large, ROWS, {}, ValueError, r"2\.00 GiB"),
]


@pytest.mark.parametrize(("make", "inputs", "options", "error", "told"), REFUSED)
def test_what_cannot_be_exported_is_refused(make, inputs, options, error, told, tmp_path):
    with pytest.raises(error, match=told):
        export_onnx(make(), tmp_path / "a.onnx", inputs, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_its_extra(module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{module}.*hf-lgelu\[onnx\]"):
        export_onnx(mlp("relu"), tmp_path / "a.onnx", ROWS)


class InPlace(nn.Module):
    """Standardizes what it is given where it lies, as code for one's own use does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x.sub_(1.0).mul_(2.0))


def test_a_network_that_works_in_place_leaves_the_inputs_given(tmp_path):
    model, rows = InPlace().eval(), torch.randn(4, 3)
    before = rows.clone()
    export_onnx(model, tmp_path / "model.onnx", rows)
    assert torch.equal(rows, before)
    (found,) = OnnxModel(tmp_path / "model.onnx")({"x": rows})
    with torch.no_grad():
        expected = torch.nn.functional.linear((before - 1.0) * 2.0, model.layer.weight, model.layer.bias)
    torch.testing.assert_close(torch.from_numpy(found), expected)


class KeepsBatchSize(nn.Module):
    """Makes numbers for a batch and keeps them for the next of this size, as YOLO's anchors."""

    def forward(self, x):
        if vars(self).get("shape") != x.shape:
            self.shape, self.kept = x.shape, torch.arange(float(x.shape[1])).expand(x.shape)
        return x + self.kept


def test_numbers_that_a_network_keeps_for_a_batch_size_do_not_fix_it(tmp_path):
    assert export_onnx(KeepsBatchSize(), tmp_path / "k.onnx", torch.zeros(8, 3)).inputs == {"x": ("batch", 3)}
    (found,) = OnnxModel(tmp_path / "k.onnx")({"x": torch.zeros(5, 3)})
    assert (found == [0, 1, 2]).all()


class Halving(nn.Module):
    """Halves the width, doubles it and joins it with the input: only even widths fit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.down, self.up = nn.Conv1d(2, 2, 2, stride=2), nn.Upsample(scale_factor=2)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


def test_sizes_that_the_network_does_not_take_are_not_tried_on_it(tmp_path):
    x = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(2))
    report = export_onnx(Halving(), tmp_path / "h.onnx", x, dynamic_axes={"x": {0: "batch", 2: "width"}})
    assert report.other_shapes == ({"batch": 1, "width": 8},)  # and not 15
    with pytest.raises(ValueError, match=r"dynamic_axes"):
        export_onnx(Halving(), tmp_path / "two.onnx", x[..., :2], dynamic_axes={"x": {0: "batch", 2: "width"}})
    assert not (tmp_path / "two.onnx").exists()


@pytest.mark.parametrize(
    ("name", "encoder", "output"),
    [
        ("SentenceTransformer", BertModel, "sentence_embedding"),
        ("CrossEncoder", BertForSequenceClassification, "scores"),
    ],
)
def test_a_model_of_sentence_transformers_goes_whole_in_one_call(tmp_path, name, encoder, output):
    package = pytest.importorskip("sentence_transformers")
    words = ("the", "a", "cat", "dog", "saw", "ate")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    encoder(BertConfig(vocab_size=11, max_position_embeddings=32, num_labels=1, **sizes)).save_pretrained(
        tmp_path / "bert"
    )
    model = getattr(package, name)(str(tmp_path / "bert"), device="cpu")
    texts = ["the cat", "a dog saw the cat", "the dog ate"]
    data = texts if name == "SentenceTransformer" else [(text, "a cat") for text in texts]
    collator = {"data_collator": model.preprocess}
    report = export_onnx(model, tmp_path / "model.onnx", data, opset=12, **collator)
    assert (report.outputs, report.opset) == ((output,), 12)
    given = {key: value for key, value in model.preprocess(data[::-1]).items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        wanted = model.double()(dict(given))[output]
    (found,) = OnnxModel(tmp_path / "model.onnx")(given)
    torch.testing.assert_close(torch.from_numpy(found), wanted.float(), rtol=0, atol=1e-5)
    model.float()
    judged = export_int8(model, tmp_path / "judged", 4 * data, allow_worse=True, **collator)
    path = tmp_path / "judged" / "model.onnx"
    assert (
        quantize_onnx(path, tmp_path / "int8.onnx", data, max_relative_error=np.inf, **collator).calibration_rows == 3
    )
    assert judged.samples == 2  # of three texts, each counted once
    assert set(OnnxModel(tmp_path / "judged" / "model-int8.onnx").input_names) == set(given)


def test_a_dataset_is_taken_by_its_first_items(tmp_path):
    rows = [{"features": row.tolist()} for row in torch.randn(20, 5, generator=torch.Generator().manual_seed(0))]
    for inputs in (DataLoader(rows, 4, collate_fn=default_data_collator), Dataset.from_list(rows)):
        report = export_onnx(mlp("relu"), tmp_path / "a.onnx", inputs, overwrite=True)
        assert report.inputs == {"features": ("batch", 5)}
    with pytest.raises(ValueError, match="no inputs"):
        export_onnx(mlp("relu"), tmp_path / "none.onnx", iter(()))
