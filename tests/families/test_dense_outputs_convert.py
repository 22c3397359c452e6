"""Detectors and segmenters of transformers: converted, compared on scores and boxes, read back without hf_lgelu."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from family import enlarge
from fresh_process import run_fresh
from small_networks import convert_with
from torch import nn
from transformers import (
    DFineConfig,
    DFineForObjectDetection,
    HGNetV2Config,
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrResNetConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    YolosConfig,
    YolosForObjectDetection,
)

from hf_lgelu.networks.sites import SMOOTH_KINDS, find_sites

_QUERIES = {
    **{"d_model": 16, "num_queries": 6, "num_denoising": 0, "num_labels": 3, "encoder_hidden_dim": 16},
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"decoder_in_channels": [16, 16], "feat_strides": [16, 32], "num_feature_levels": 2, "encode_proj_layers": [1]},
    **{"encoder_in_channels": [16, 16], "decoder_layers": 2, "decoder_n_points": 2},
}


def rt_detr() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "layer_type": "basic"}
    backbone = RTDetrResNetConfig(**sizes, out_features=["stage3", "stage4"], hidden_act="silu")
    return RTDetrForObjectDetection(RTDetrConfig(backbone_config=backbone, **_QUERIES))


def d_fine() -> nn.Module:
    stages = {"stage_in_channels": [8, 8, 16, 16], "stage_mid_channels": [8] * 4, "stage_out_channels": [8, 16, 16, 16]}
    backbone = HGNetV2Config(
        **stages, stem_channels=[3, 8, 8], stage_num_blocks=[1] * 4, stage_numb_of_layers=[1] * 4, embedding_size=8,
        hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, out_features=["stage3", "stage4"], hidden_act="silu",
    )  # fmt: skip
    sizes = {**_QUERIES, "decoder_n_points": [2, 2]}
    return DFineForObjectDetection(DFineConfig(backbone_config=backbone, depth_mult=0.34, **sizes))


def yolos() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"image_size": [32, 32], "patch_size": 8, "use_mid_position_embeddings": False}  # there is no middle
    return YolosForObjectDetection(YolosConfig(**sizes, num_detection_tokens=5, num_labels=3))


def segformer() -> nn.Module:
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
    )  # fmt: skip
    return SegformerForSemanticSegmentation(config)


@dataclass(frozen=True)
class Dense:
    """One architecture: its outputs that count, its gates, and those of them that its code fixes whatever the config
    says (a pattern of their names)."""

    build: Callable[[], nn.Module]
    outputs: tuple[str, ...]
    gates: int
    side: int = 64
    fixed: str | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return enlarge(self.build())

    def pictures(self, count: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(0)
        return {"pixel_values": torch.randn(count, 3, self.side, self.side, generator=draws)}

    def kept(self, model: nn.Module) -> list[str]:
        names = [site.name for site in find_sites(model, SMOOTH_KINDS)]
        return [name for name in names if self.fixed is not None and re.search(self.fixed, name)]


BOXES = ("logits", "pred_boxes")
DENSE: Mapping[str, Dense] = {
    "yolos": Dense(yolos, BOXES, 1, side=32),
    "segformer": Dense(segformer, ("logits",), 2, side=32),
    # the stem's three, one of each of four stages; of the encoder one in the MLP, one lateral, one downsampling, and in
    # each of two joining blocks two convolutions and three re-parameterizable ones; the decoder has ReLU
    "rt_detr": Dense(rt_detr, BOXES, 3 + 4 + 1 + 2 + 2 * 5),
    # the stem's five (the stages have ReLU), one MLP, and in each of two joining blocks twice two convolutions and a
    # re-parameterizable one, beside four convolutions whose SiLU no key of the config names
    "d_fine": Dense(d_fine, BOXES, 5 + 1 + 2 * 2 * 3, fixed=r"(fpn|pan)_blocks\.\d\.conv\d\.activation$"),
}

_READER = """
import json, sys, torch, transformers
from pathlib import Path
torch.set_num_threads(1)
for folder in Path(sys.argv[1]).iterdir():
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    with torch.no_grad():
        found = model(**torch.load(folder / "inputs.pt"))
    torch.save({name: value for name, value in found.items() if isinstance(value, torch.Tensor)}, folder / "found.pt")
assert not [name for name in sys.modules if name.startswith("hf_lgelu")]
"""


QUICK = ("yolos", "segformer")


@pytest.fixture(scope="module")
def conversions(tmp_path_factory):
    """name → (conversion, its outputs, those of the saved model in a process without hf_lgelu); one process reads all
    quick ones, and one the others."""
    found = {}

    def of(name):
        if name not in found:
            together = [other for other in DENSE if (other in QUICK) == (name in QUICK)]
            found.update(_converted(together, tmp_path_factory.mktemp("dense")))
        return found[name]

    return of


def _converted(names, root):
    here = {}
    for name in names:
        model = DENSE[name].model()
        pictures = DENSE[name].pictures(80)
        conversion = convert_with(model, pictures, batch_size=16, max_kl=None, keep=DENSE[name].kept(model))
        inputs = DENSE[name].pictures(2)
        conversion.model.save_pretrained(root / name)
        torch.save(inputs, root / name / "inputs.pt")
        with torch.no_grad():
            here[name] = conversion, conversion.model(**inputs)
    reader = root.with_name(f"{root.name}-reader.py")
    reader.write_text(_READER)
    done = run_fresh(reader, root)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (*both, torch.load(root / name / "found.pt")) for name, both in here.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DENSE]
)
def test_scores_boxes_and_maps_are_nearer_than_the_swaps(name, conversions):
    dense = DENSE[name]
    (converted, report), here, elsewhere = conversions(name)
    assert report.outputs == dense.outputs
    assert len(report.gates) == dense.gates
    assert {site.name for site in find_sites(converted, SMOOTH_KINDS)} == set(dense.kept(dense.model()))
    direct, refitted = report.held_out.direct, report.held_out.refitted
    assert refitted.value < direct.value
    for output in dense.outputs[1:]:
        assert refitted.outputs[output].relative_error < direct.outputs[output].relative_error
    with torch.no_grad():
        original = dense.model()(**dense.pictures(2))
    for output in dense.outputs:
        assert (elsewhere[output] - here[output]).abs().max() <= 1e-5 * here[output].abs().max()
        assert (original[output] - here[output]).abs().max() > 1e-4 * here[output].abs().max()
