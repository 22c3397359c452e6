"""Every family of the tables: its gates become ReLU and the next maps are refitted, or an error names what cannot be.

The converted models are read back by a process without hf_lgelu.
"""

from pathlib import Path

import pytest
import torch
from family import Family, logits_of
from fresh_process import run_fresh
from safetensors.torch import save_file
from small_networks import convert_with
from test_families import ALL, assert_apart, assert_close
from timm_families import TimmFamily
from torch import nn

from hf_lgelu import from_pretrained
from hf_lgelu.networks.sites import find_sites
from hf_lgelu.refit.convert import Conversion
from hf_lgelu.refit.refusals import ConversionRefusedError

HERE = Path(__file__).parent

# Maps after gates that cannot be refitted, from the architecture: the language modelling head has the embedding's
# weight.
UNFIT = {
    "bert": {"bert.embeddings.word_embeddings.weight"},
    "distilbert": {"distilbert.embeddings.word_embeddings.weight"},
    "roberta": {"roberta.embeddings.word_embeddings.weight"},
    "modernbert": {"model.embeddings.tok_embeddings.weight"},
}
# Its random weights amplify what the first layer leaves; dense least squares keeps the last layer, too.
NO_BETTER = {"patchtst"}
LEFT_OUT = NO_BETTER | {"mixtral"}  # whose experts no map stands for: tests/refit/test_convert_tied_and_routed.py
QUICK = {"gpt2", "timm-convnext"}  # BERT is converted in most tests of refit


def converting(quick: bool) -> list[Family | TimmFamily]:
    return [family for family in ALL if family.name not in LEFT_OUT and (family.name in QUICK) == quick]


def over(families):
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(family, id=family.name, marks=() if family.name in QUICK else pytest.mark.slow)
            for family in families
        ],
    )


def smooth(family: Family | TimmFamily) -> nn.Module:
    if isinstance(family, Family):
        return family.build()
    return family.build({"string": "gelu", "class": nn.GELU, "nothing": None}[family.accepts])


def calibration(family: Family | TimmFamily) -> dict[str, torch.Tensor]:
    """As the family's inputs: 48 sentences, 256 small or 128 images; where all have the same token, it stays."""
    inputs, generator = family.inputs(), torch.Generator().manual_seed(0)
    # An eighth is held out, and on 16 images of random numbers a deep network says little.
    count = 48 if "input_ids" in inputs else 256 if "resnet18" in family.name else 128
    found = {}
    for name, value in inputs.items():
        shape = (count, *value.shape[1:])
        if value.is_floating_point():
            found[name] = torch.randn(shape, generator=generator)
        else:
            ids = torch.randint(3, 31, shape, generator=generator)
            found[name] = torch.where((value == value[:1]).all(0), value[:1], ids)
    return found


def convert(family: Family | TimmFamily, **options) -> Conversion:
    size = 12 if family.name not in _IMAGES else 16
    return convert_with(smooth(family), calibration(family), batch_size=size, **options)


_IMAGES = {family.name for family in ALL if "input_ids" not in family.inputs()}


def called(family: Family | TimmFamily) -> int:
    """Gates that the family's code calls as functions, which no config can say."""
    return sum(count for name, count in family.smooth.items() if name.endswith(" gelu"))


def _folder(family: Family | TimmFamily, root: Path) -> Path:
    return root / ("soft" if called(family) else "") / family.name


def _leave(family: Family | TimmFamily, folder: Path) -> tuple[Conversion, torch.Tensor]:
    conversion = convert(family)
    if isinstance(family, TimmFamily):
        folder.mkdir()
        save_file(conversion.model.state_dict(), folder / "model.safetensors")
    elif family.relu_config:
        conversion.model.save_pretrained(folder)
        assert ("lambda_gelu" in (folder / "config.json").read_text()) == bool(called(family))
    if folder.exists():
        torch.save(family.inputs(), folder / "inputs.pt")
    return conversion, logits_of(conversion.model, family.inputs())


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """family → (conversion, its logits, those of the saved model in a process without hf_lgelu, what that process says
    instead where gates are called, or None)."""
    found = {}

    def of(family):
        quick = family.name in QUICK
        if quick not in found:
            root = tmp_path_factory.mktemp("converted")
            here = {one.name: _leave(one, _folder(one, root)) for one in converting(quick)}
            found[quick] = here, _elsewhere(root)
        here, elsewhere = found[quick]
        return *here[family.name], elsewhere.get(family.name)

    return of


def _elsewhere(root: Path) -> dict[str, torch.Tensor | tuple[str, Path]]:
    reader = run_fresh(HERE / "relu_reader.py", root)
    assert reader.returncode == 0, reader.stderr[-3000:]
    result = torch.load(root / "logits.pt")
    assert result["modules"] == []
    return result["logits"] | {name: (said, root / "soft" / name) for name, said in result["refusals"].items()}


@over(converting(quick=True) + converting(quick=False))
def test_a_converted_family(family, converted):
    (model, report), logits, elsewhere = converted(family)
    assert len(report.gates) == family.sites + called(family)
    assert find_sites(model) == []
    assert {site for layer in report.layers for site in layer.sites} == set(report.gates)
    unfit = {layer.layers[0] for layer in report.layers if (layer.note or "").startswith("not refitted")}
    assert unfit == UNFIT.get(family.name, set())
    assert any(layer.choice == "refit" for layer in report.layers)
    direct, refitted = report.held_out.direct, report.held_out.refitted
    assert refitted.relative_error < direct.relative_error
    assert refitted.kl is None or refitted.kl < direct.kl
    assert_apart(logits_of(smooth(family), family.inputs()), logits)
    if called(family):
        said, folder = elsewhere
        assert "hf_lgelu.from_pretrained" in said
        assert_close(logits_of(from_pretrained(family.model_class, folder), family.inputs()), logits)
    elif isinstance(family, TimmFamily) or family.relu_config:
        assert_close(elsewhere, logits)


@over([family for family in ALL if family.name in NO_BETTER])
def test_a_refit_that_is_no_better_is_refused(family):
    with pytest.raises(ConversionRefusedError, match="no nearer to the original") as caught:
        convert(family)
    held_out = caught.value.report.held_out
    assert held_out.refitted.relative_error > held_out.direct.relative_error
