"""Every family of the tables: the weights absorb λ, exactly, or the sites that prevent it are named."""

import copy
import re

import pytest
import torch
from family import logits_of
from test_families import ALL, over, with_lambda_gelu
from torch import nn

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.export.absorption.absorb import absorb_hardness
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites

# Sites that cannot absorb λ, by family, from the architecture. The rest of each family's sites must not be named.
REFUSED = {
    # LayerNorm stands between the activation of the language modelling head and the next layer
    "bert": {"cls.predictions.transform.transform_act_fn"},
    "distilbert": {"activation"},
    # one layer makes both the gate and what it gates; head: as BERT
    "modernbert": {"model.layers.0.mlp.act", "model.layers.1.mlp.act", "head.act"},
    "mixtral": {"model.layers.0.mlp.experts.act_fn", "model.layers.1.mlp.experts.act_fn"},
    # the stem's feeds a residual branch as well; the others stand behind the sum
    "resnet": {
        "resnet.embedder.embedder.activation",
        *(f"resnet.encoder.stages.{stage}.layers.0.activation" for stage in range(2)),
    },
    # as ResNet; and squeeze-and-excitation uses its input twice
    "regnet": {
        "regnet.embedder.embedder.activation",
        *(f"regnet.encoder.stages.{stage}.layers.0.activation" for stage in range(2)),
        *(f"regnet.encoder.stages.{stage}.layers.0.layer.1.activation" for stage in range(2)),
    },
    # a level's context is used as it is and averaged, and the average is activated again
    "focalnet": {
        *(f"focalnet.encoder.stages.{stage}.layers.0.modulation.activation" for stage in range(2)),
        *(f"focalnet.encoder.stages.{stage}.layers.0.modulation.focal_layers.0.1" for stage in range(2)),
    },
    # LayerNorm behind the last convolution; weight normalization makes the positional convolution's weight
    "wav2vec2": {"wav2vec2.feature_extractor.conv_layers.1.activation", "wav2vec2.encoder.pos_conv_embed.activation"},
    "timm-wrapper-resnet18": {"timm_model.act1", *(f"timm_model.layer{layer}.0.act2" for layer in (1, 2, 3, 4))},
    "timm-resnet18": {"act1", *(f"layer{layer}.0.act2" for layer in (1, 2, 3, 4))},
    # squeeze-and-excitation: one a block
    "timm-efficientnet": {
        "blocks.0.0.bn1.act",
        *(f"blocks.{stage}.{block}.bn2.act" for stage, n in enumerate((0, 2, 2, 3, 3, 4, 1)) for block in range(n)),
    },
    "timm-mobilenetv3": {f"blocks.{s}.{b}.bn2.act" for s, n in ((2, 3), (3, 2), (4, 3)) for b in range(n)},
    # 1, 1, 4 and 7 blocks
    "timm-regnet": {
        "stem.bn.act",
        *(f"s{stage}.b{block}.act3" for stage, n in ((1, 1), (2, 1), (3, 4), (4, 7)) for block in range(1, n + 1)),
    },
    # goes to each dense layer and to the end of the block
    "timm-densenet": {"features.norm0.act"},
    # half of the channels gate the other half
    "timm-gmlp": {"blocks.0.mlp_channels.act", "blocks.1.mlp_channels.act"},
}
FOLDING = tuple(family for family in ALL if family.name not in REFUSED)
# One of each wiring: a map before the gate, and a gate that multiplies; in front of a norm, of one map for both halves,
# of a residual sum, and of half of the channels.
QUICK = {"gpt2", "t5-gated", "bert", "modernbert", "resnet", "timm-gmlp"}
NOT_IN_FLOAT64 = {"mixtral"}  # its experts' matrix product


def prepared(family):
    """The model with hardnesses far from 1, and its inputs, in float64 where that runs."""
    model, inputs = with_lambda_gelu(family), family.inputs()
    for index, module in enumerate(m for m in model.modules() if isinstance(m, LambdaGate)):
        module.hardness_override.fill_((1.5, 3.0, 20.0)[index % 3])
    if family.name in NOT_IN_FLOAT64:
        return model, inputs
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@over(FOLDING, quick=[family for family in FOLDING if family.name in QUICK])
def test_absorbing_leaves_the_function(family):
    model, inputs = prepared(family)
    before = logits_of(model, inputs)
    soft_model = copy.deepcopy(model)
    for site in find_sites(soft_model, LEARNED_KINDS):
        site.put(nn.GELU())
    assert (logits_of(soft_model, inputs) - before).abs().max() > 1e-3 * before.abs().max()
    report = absorb_hardness(model, inputs, rewrite_config=False)
    assert len(report) == family.sites
    assert find_sites(model, LEARNED_KINDS) == []
    after = logits_of(model, inputs)
    # RMS norms of transformers and DeBERTa's attention round to float32 whatever the model's dtype.
    assert (after - before).abs().max() <= 1e-12 * before.abs().max()


@over([family for family in ALL if family.name in REFUSED], quick=[family for family in ALL if family.name in QUICK])
def test_exactly_the_sites_that_do_not_absorb_are_named(family):
    model, inputs = prepared(family)
    before = logits_of(model, inputs)
    with pytest.raises(ValueError, match="cannot become a plain GELU model") as caught:
        absorb_hardness(model, inputs, rewrite_config=False)
    assert set(re.findall(r"\n  ([\w.]+): ", str(caught.value))) == REFUSED[family.name]
    assert torch.equal(logits_of(model, inputs), before)
