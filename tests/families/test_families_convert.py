"""Every family of the tables, from text to codecs, and of timm: each converts with all of its gates."""

from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES
from family import Family, main_output
from fresh_process import run_fresh
from further_families import FURTHER_FAMILIES
from packaging.version import Version
from small_networks import convert_with
from timm_families import TIMM_FAMILIES, TimmFamily
from torch import nn

from hf_lgelu import from_pretrained
from hf_lgelu.models.checkpoint import save_checkpoint
from hf_lgelu.networks.sites import SMOOTH_KINDS, find_sites
from hf_lgelu.refit.task import Exchange

STATE_SPACES = {
    *("mamba", "falcon-mamba", "mamba2", "jamba", "bamba", "granitemoehybrid", "qwen3-next", "olmo-hybrid"),
    *("nemotron-h", "falcon-h1", "zamba2"),
}
# Its random weights amplify what the first layer leaves; dense least squares keeps the last layer, too.
NO_BETTER = {"patchtst"}
# Experts in one tensor.
NOT_REFITTED = {"mixtral", "qwen3-moe", "dbrx"}
# Older versions run other code: products of experts that no CPU has, and convolutions that call their gate's module.
OTHERWISE = {"mixtral", "qwen3-moe"} if Version(torch.__version__) < Version("2.9") else set()
OTHERWISE |= {*STATE_SPACES, "dbrx", "longcat-flash"} if Version(transformers.__version__) < Version("5.15") else set()
SLOW = STATE_SPACES - {"mamba", "jamba", "qwen3-next", "nemotron-h"}
SLOW |= {family.name for family in TIMM_FAMILIES} - {"timm-convnext"}
EVERY = [
    family for family in FAMILIES + FURTHER_FAMILIES + TIMM_FAMILIES if family.name not in {*NO_BETTER, *OTHERWISE}
]


def called(family: Family | TimmFamily) -> int:
    """Gates that the family's code calls as functions, which no config can say."""
    return sum(count for name, count in family.smooth.items() if name.endswith(" gelu"))


def smooth(family: Family | TimmFamily) -> nn.Module:
    if isinstance(family, Family):
        return family.build()
    return family.build({"string": "gelu", "class": nn.GELU, "nothing": None}[family.accepts])


def batches(family: Family | TimmFamily) -> list[dict[str, torch.Tensor]]:
    """Eight batches of 16 in the form of the family's inputs; what is the same for both samples there stays."""
    found = []
    for seed in range(8):
        generator, batch = torch.Generator().manual_seed(seed), {}
        for name, value in family.inputs().items():
            shape = (16, *value.shape[1:])
            drawn = torch.randn(shape, generator=generator)
            if not value.is_floating_point():
                drawn = torch.randint(3, 31, shape, generator=generator)
            batch[name] = torch.where((value == value[:1]).all(0), value[:1], drawn)
        found.append(batch)
    return found


def test_there_are_sixty_and_some_of_every_kind():
    tried = {family.name for family in EVERY}
    assert len(tried) >= 60
    kinds = {"bert", "vit", "whisper", "clip", "yolos", "timesfm", "mamba", "mixtral", "encodec", "timm-resnet18"}
    assert kinds <= tried | OTHERWISE


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name in SLOW)) for each in EVERY],
)
def test_a_family_converts(family, tmp_path):
    model, report = convert_with(smooth(family), batches(family))
    assert len(report.gates) == family.sites + called(family)
    assert find_sites(model) == []
    assert {site for layer in report.layers for site in layer.sites} == set(report.gates)
    direct, refitted = report.held_out.direct.relative_error, report.held_out.refitted.relative_error
    if family.name in NOT_REFITTED:
        assert all(layer.note.startswith("not refitted") for layer in report.layers if layer.sites)
        assert refitted <= 1.001 * direct  # maps further on may be
    else:
        assert refitted < direct
    if family.name in STATE_SPACES:  # token by token other functions run
        model.save_pretrained(tmp_path)
        ids, options = family.inputs()["input_ids"][:1], dict(max_new_tokens=3, pad_token_id=0, eos_token_id=None)
        expected = model.generate(ids, use_cache=False, **options)
        for each in (model, from_pretrained(family.model_class, tmp_path).eval()):
            assert torch.equal(each.generate(ids, **options), expected)


# No key of these configs says ReLU: either no plain load finds the weights, or the kept guard refuses it.
WITHOUT_KEY = {"bark", "bloom", "cvt", "encodec", "focalnet", "levit", "mgp-str", "mpt", "timesfm"}

PLAIN_LOADS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, transformers
from family import main_output
for folder in sys.argv[1:]:
    kept = torch.load(folder + "/kept.pt")
    try:
        model = getattr(transformers, kept["class"]).from_pretrained(folder).eval()
    except (OSError, KeyError) as error:
        print("refused" if "no file named" in str(error) or "hf_lgelu" in str(error) else error)
    else:
        print("same" if torch.equal(main_output(model(**kept["inputs"])), kept["output"]) else "another")
assert "hf_lgelu" not in sys.modules
"""


@pytest.mark.parametrize(
    "names", [pytest.param(WITHOUT_KEY, id="without a key"), pytest.param(None, id="all", marks=pytest.mark.slow)]
)
def test_without_this_package_no_folder_is_another_network(names, tmp_path):
    families = [each for each in EVERY if isinstance(each, Family) and (names is None or each.name in names)]
    assert names is None or len(families) == len(names)
    for family in families:
        model, inputs = family.build().eval(), family.inputs()
        Exchange(SMOOTH_KINDS, ()).carry_out(model)
        save_checkpoint(model, tmp_path / family.name)
        output = main_output(model(**inputs)).detach()
        ours = from_pretrained(type(model), tmp_path / family.name).eval()
        assert torch.equal(main_output(ours(**inputs)), output)
        kept = {"class": type(model).__name__, "inputs": inputs, "output": output}
        torch.save(kept, tmp_path / family.name / "kept.pt")
    script = tmp_path / "plain_loads.py"
    script.write_text(PLAIN_LOADS)
    ran = run_fresh(script, *(tmp_path / family.name for family in families))
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.splitlines()) == ({"refused"} if names else {"refused", "same"})
    assert len(ran.stdout.splitlines()) == len(families)
