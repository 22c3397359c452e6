"""Models as others have made them: adapters, quantizers, outputs other than logits, sentence encoders, random masks."""

import contextlib
import types
from contextlib import nullcontext

import accelerate
import peft
import pytest
import small_networks as networks
import torch
from refit_nets import BY_NAME, drawn
from small_detector import BINS, CLASSES, load
from small_networks import convert_with
from torch import nn
from transformers import LlamaForCausalLM

from hf_lgelu import ConversionRefusedError, compare_networks, convert_to_relu
from hf_lgelu.models.copies import forget_quantizer
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit.refusals import why_not_writable
from hf_lgelu.refit.task import evaluate_conversion


def llama():
    torch.manual_seed(0)
    return networks.llama(initializer_range=0.3).eval()


def tokens(count=40, length=8, seed=0):
    return {"input_ids": torch.randint(3, 30, (count, length), generator=torch.Generator().manual_seed(seed))}


def with_lora():
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["down_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return model.eval()


@pytest.mark.parametrize("place", ["cpu", "disk", "device_map"])
def test_values_that_accelerate_keeps_elsewhere_are_read_and_stay_there(place, tmp_path):
    model, inputs = llama(), tokens()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    expected = convert_to_relu(model, inputs).model.state_dict()
    before = model(**inputs).logits
    if place == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    elif place == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    else:
        model.save_pretrained(tmp_path)
        parts = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        parts["model.layers"] = "disk"
        model = LlamaForCausalLM.from_pretrained(tmp_path, device_map=parts, offload_folder=tmp_path / "unchanged")
    assert model.model.layers[0].mlp.down_proj.weight.is_meta
    converted = convert_to_relu(model, inputs).model
    assert model.model.layers[0].mlp.down_proj.weight.is_meta
    assert torch.equal(model(**inputs).logits, before)
    assert all(torch.equal(value, expected[name]) for name, value in converted.state_dict().items())
    assert converted.lm_head.weight is converted.model.embed_tokens.weight
    converted.save_pretrained(tmp_path / "relu")
    assert LlamaForCausalLM.from_pretrained(tmp_path / "relu").config.hidden_act == "relu"


@pytest.mark.parametrize(
    "given", [lambda model: model, lambda model: model.base_model.model], ids=["wrapped", "inside"]
)
def test_an_adapter_that_is_not_merged_is_refused_with_what_to_do(given):
    model = with_lora()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"of PEFT.*merge_and_unload\(\)"):
        convert_to_relu(given(model), tokens())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_quantizer_over_weights_that_are_float_is_no_reason(tmp_path):
    """As of a GGUF file that was dequantized: the result is saved as the plain checkpoint that it is."""
    model = llama()
    model.hf_quantizer, model.is_quantized = object(), True
    model.config.quantization_config = {"quant_method": "gguf"}
    converted, report = convert_to_relu(model, tokens())
    assert report.config_changes[-1] == "quantization_config removed: the weights are floating point"
    assert model.is_quantized
    assert model.config.quantization_config
    converted.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(loaded.config, "quantization_config")
    torch.testing.assert_close(loaded(**tokens(4)).logits, converted(**tokens(4)).logits)
    assert list(forget_quantizer(loaded)) == []
    assert why_not_writable(loaded) is None


def inputs_of_six():
    return torch.randn(160, 6, generator=torch.Generator().manual_seed(3))


def compiled(model):
    """In place, as `Trainer` does it, and run once."""
    model.compile(backend="eager")
    model(torch.zeros(2, 6))
    return nullcontext()


def can_be_exported(model):
    try:
        return torch.export.export(model, (torch.zeros(2, 6),), strict=False) is not None
    except RuntimeError:
        return False


EFFORTS = {"refit": {}, "distill": {"effort": "distill", "distill_steps": 4}}


@pytest.fixture(scope="module")
def two_blocks():
    """A way to make the same small network again, and what becomes of it by each of EFFORTS."""

    def make():
        torch.manual_seed(0)
        layers = (nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3))
        return drawn(nn.Sequential(*layers)).float()

    return make, {effort: convert_with(make(), inputs_of_six(), **options) for effort, options in EFFORTS.items()}


@pytest.mark.parametrize(
    ("enter", "effort"),
    [
        (compiled, "refit"),
        (lambda model: torch.inference_mode(), "distill"),  # in which no step of Adam could be taken
        (lambda model: torch.autocast("cpu", dtype=torch.bfloat16), "refit"),
    ],
    ids=["compiled", "inference", "autocast"],
)
def test_what_the_caller_is_in_changes_nothing(enter, effort, two_blocks):
    make, conversions = two_blocks
    plain, expected = conversions[effort]
    model = make()
    with enter(model):
        if enter is compiled and not can_be_exported(model):
            pytest.skip("this torch exports no model that is compiled in place")
        converted, report = convert_with(model, inputs_of_six(), **EFFORTS[effort])
    assert report.layers == expected.layers
    values = converted.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in plain.state_dict().items())
    assert not any(parameter.is_inference() for parameter in converted.parameters())


class Detector(nn.Module):
    """Scores and boxes of a few places, and the features that they are read from."""

    def __init__(self):
        super().__init__()
        self.stem, self.act, self.neck = nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(6, 5, 1)
        self.beside, self.scores, self.boxes = nn.GELU(), nn.Linear(5, 3), nn.Linear(5, 4)

    def forward(self, pixel_values):
        features = self.act(self.stem(pixel_values))
        places = self.neck(features).flatten(2).mT
        return {
            "encoder_hidden_states": [features, self.beside(features)], "feature_maps": features,
            "pred_boxes": self.boxes(places).sigmoid(), "logits": self.scores(places),
        }  # fmt: skip


def images(count=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(count, 2, 6, 6, generator=generator, dtype=torch.float64)}


def test_outputs_that_the_task_reads_are_counted_and_no_others():
    model = drawn(Detector())
    second = images(30, seed=1)
    converted, report = convert_to_relu(model, images(), evaluation_data=second)
    assert report.outputs == ("logits", "pred_boxes")
    assert "outputs that counted: `logits`, `pred_boxes`\n" in str(report)
    (unread,) = (layer for layer in report.layers if layer.sites == ("beside",))
    assert (unread.choice, unread.note) == ("unchanged", "no output that counts depends on it")
    assert {layer.layers for layer in report.layers} == {("beside",), ("neck",)}
    with torch.no_grad():
        expected, found = model(**second), converted(**second)
    assert isinstance(converted.beside, nn.ReLU)
    for name, distance in report.evaluation.refitted.outputs.items():
        rows = [output[name].flatten(0, 1) for output in (expected, found)]
        exact = (rows[1] - rows[0]).square().sum() / (rows[0] - rows[0].mean(0)).square().sum()
        assert distance.relative_error == pytest.approx(exact.item(), rel=1e-9)
    p, q = (output["logits"].log_softmax(-1) for output in (expected, found))
    assert report.evaluation.refitted.outputs["logits"].kl == pytest.approx(
        (p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-9
    )


class Wrapped(nn.Module):
    """A `Yolo` with the outputs of transformers' detectors, written by hand."""

    config = types.SimpleNamespace(num_labels=CLASSES)  # scores are read by a sigmoid each

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        cells = torch.cat([cells.flatten(2) for cells in self.net(x)[1]], 2).mT
        return {"logits": cells[..., 4 * BINS :], "pred_boxes": cells[..., : 4 * BINS]}


def errors_of(distance):
    return {name: output.relative_error for name, output in distance.outputs.items()}


def test_raw_maps_are_converted_as_the_scores_and_boxes_that_they_are(monkeypatch):
    monkeypatch.setattr("hf_lgelu.refit.convert.is_nearer", lambda *given: True)  # the later rung is kept
    net, pictures = load(), torch.rand(96, 3, 32, 32)
    options = {"distill_steps": 8}
    found, report = convert_with(net, pictures, outputs=["1"], box_channels=4 * BINS, **options)
    expected, of_wrapped = convert_with(Wrapped(net), pictures, **options)
    assert report.outputs == ("logits", "pred_boxes")
    assert [name.removeprefix("net.") for name in of_wrapped.gates] == [*report.gates]
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, expected.net.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert errors_of(report.held_out.refitted) == pytest.approx(errors_of(of_wrapped.held_out.refitted), rel=1e-3)
    swap = types.SimpleNamespace(gates=(), applied=contextlib.nullcontext)
    evaluation, gaps = evaluate_conversion(OutputReader(net, ["1"], 4 * BINS), found, swap, [Batch(pictures, None)])
    assert (len(gaps), sum(gaps)) == (96, pytest.approx(evaluation.refitted.detection, rel=1e-9))
    table = compare_networks(net, found, pictures, outputs=["1"], box_channels=4 * BINS)
    by_hand = compare_networks(Wrapped(net), expected, pictures)
    assert errors_of(table.rows[1].distance) == pytest.approx(errors_of(by_hand.rows[1].distance), rel=1e-3)


def test_the_refit_keeps_the_mean_chance_of_each_class_of_a_detector():
    net, pictures = load(), torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for head in net.cv3:  # objects are rare: a cell's mean chance is 0.007 at most
            head[-1].weight *= 6
            head[-1].bias -= 8
        found, _ = convert_with(net, pictures, outputs=["1"], box_channels=4 * BINS)
        chances = [
            [maps[:, 4 * BINS :].sigmoid().mean((0, 2, 3)) for maps in each(pictures)[1]] for each in (net, found)
        ]
    for expected, given in zip(*chances, strict=True):  # of the fine and of the coarse map
        torch.testing.assert_close(given, expected, rtol=0.01, atol=0)


def test_other_outputs_on_request():
    model = drawn(Detector())
    report = convert_with(model, images(), outputs=["pred_boxes"]).report
    assert (report.outputs, report.held_out.refitted.kl) == (("pred_boxes",), None)
    turned = convert_with(model, images(), outputs=["pred_boxes", "logits"]).report
    expected = convert_with(model, images()).report.held_out.refitted.detection
    assert turned.held_out.refitted.detection == pytest.approx(expected, rel=1e-9)
    alone = convert_with(model, images(), outputs=["logits", "feature_maps"]).report
    assert any("its output is the model's" in (layer.note or "") for layer in alone.layers)
    with pytest.raises(ValueError, match=r"encoder_hidden_states\.0, .*\['masks'\]"):
        convert_with(model, images(), outputs=["masks"])
    bare, rows = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), torch.randn(100, 4)
    with pytest.raises(ValueError, match=r"without a name.*\['logits'\]"):
        convert_with(bare, rows, outputs=["logits"])
    with pytest.raises(ValueError, match="got no name"):
        convert_with(bare, rows, outputs=[])


def test_a_mask_that_is_drawn_anew_at_each_forward_is_the_same_for_all_networks():
    class Masked(nn.Sequential):
        """As ViT-MAE: hides a part of each sample, in evaluation too."""

        def forward(self, x):
            return super().forward(x * (torch.rand(x.shape) < 0.75))

    torch.manual_seed(0)
    model = Masked(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3)).eval()
    data = torch.randn(80, 6)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    (_, report), (_, again) = (convert_to_relu(model, data) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)  # and the generator of the caller is left alone
    assert report.held_out.direct.relative_error < 0.2
    assert report.layers == again.layers
    assert report.held_out == again.held_out


def test_far_from_the_original_is_said_first_and_refused_on_request():
    net = BY_NAME["mlp"]
    model, inputs = net.model(), net.inputs()
    report = convert_to_relu(model, inputs).report
    kl = report.held_out.refitted.kl
    assert not any("max_kl" in text for text in report.warnings)
    near = convert_with(model, inputs, max_kl=1.01 * kl, strict=True).report
    assert near.held_out == report.held_out
    far = convert_with(model, inputs, max_kl=0.99 * kl).report
    (warning,) = (text for text in far.warnings if "max_kl" in text)
    assert warning.startswith(f"on the inputs held out of the data the converted network is KL {kl:.3g} nat away")
    with pytest.raises(ConversionRefusedError, match="`strict`") as caught:
        convert_with(model, inputs, max_kl=0.99 * kl, strict=True)
    assert caught.value.report.held_out == report.held_out
    with pytest.raises(ConversionRefusedError, match="held out"):
        convert_with(model, net.inputs(units=40), strict=True)
    with pytest.raises(ValueError, match="max_kl"):
        convert_with(model, inputs, max_kl=0.0)
