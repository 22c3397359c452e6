"""DeiT-Tiny from scratch and from checkpoints that are made here."""

from types import SimpleNamespace

import pytest
import torch
from lgelu_lab.benchmarks.data import ModelOptions
from lgelu_lab.benchmarks.tiny_imagenet import build_deit, image_processor
from PIL import Image
from torch.nn import functional as F
from transformers import (
    AutoModelForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    GPT2Config,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)

from hf_lgelu.models.loading import extend_from_pretrained
from hf_lgelu.models.sites import lambda_gelu_modules
from hf_lgelu.registry import register_activation

register_activation()
extend_from_pretrained()
DATA = SimpleNamespace(label_names=("cat", "dog", "frog"))
TINY = {
    "image_size": 32, "patch_size": 8, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 20,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a trained-looking ViT of five classes."""

    def make(model_class=ViTForImageClassification, config_class=ViTConfig, num_labels=5, **changes):
        torch.manual_seed(0)
        model = model_class(config_class(**TINY, num_labels=num_labels, **changes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
        model.save_pretrained(tmp_path / "checkpoint")
        return str(tmp_path / "checkpoint"), model.eval()

    return make


def images(size, count=2):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def test_it_is_the_papers_model():
    model = build_deit("lambda_gelu", SimpleNamespace(label_names=[str(i) for i in range(1000)]))
    assert model.num_parameters() == 5_717_416 + 12
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (12, 192, 3)
    assert (config.intermediate_size, config.image_size, config.patch_size, config.model_type) == (768, 224, 16, "vit")
    assert len(lambda_gelu_modules(model)) == 12


def test_image_and_patch_size_are_options_and_classes_have_names():
    model = build_deit("gelu", DATA, ModelOptions(image_size=24, patch_size=4))
    assert model.vit.embeddings.position_embeddings.shape == (1, 37, 192)
    assert model(images(24)).logits.shape == (2, 3)
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "frog"}
    assert model.config.label2id == {"cat": 0, "dog": 1, "frog": 2}


@pytest.mark.parametrize(("size", "near"), [(40, "32 or 48"), (8, "16$")])
def test_an_image_that_patches_do_not_fill_is_refused(size, near):
    with pytest.raises(ValueError, match=f"divisible by the patch size, 16, got {size}; take {near}"):
        build_deit("gelu", DATA, ModelOptions(image_size=size, patch_size=16))


def test_a_checkpoint_keeps_its_weights_and_gets_a_head_and_hardnesses(checkpoint):
    folder, original = checkpoint()
    model = build_deit("lambda_gelu", DATA, ModelOptions(pretrained=folder, image_size=32)).eval()
    before, after = original.state_dict(), model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("classifier"))
    assert after["classifier.weight"].shape == (3, 12)
    assert [module.hardness.item() for _, module in lambda_gelu_modules(model)] == pytest.approx([1.05] * 2)
    assert model.config.id2label == {0: "cat", 1: "dog", 2: "frog"}
    assert model.config.hidden_act == "lambda_gelu"


@pytest.mark.parametrize(
    ("model_class", "config_class"), [(ViTForImageClassification, ViTConfig), (DeiTForImageClassification, DeiTConfig)]
)
@pytest.mark.parametrize("image_size", [16, 48])
def test_position_embeddings_are_interpolated_to_the_size_asked_for(
    checkpoint, tmp_path, model_class, config_class, image_size
):
    folder, original = checkpoint(model_class, config_class, num_labels=3)
    model = build_deit("gelu", DATA, ModelOptions(pretrained=folder, image_size=image_size)).eval()
    pixels = images(image_size)
    with torch.no_grad():
        expected = original(pixels, interpolate_pos_encoding=True).logits
        assert not torch.allclose(model(pixels).logits[0], model(pixels).logits[1])
        torch.testing.assert_close(model(pixels).logits, expected)
    extra = 1 if model_class is ViTForImageClassification else 2
    old = original.base_model.embeddings.position_embeddings.detach()
    grid = old[:, extra:].view(1, 4, 4, 12).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, (image_size // 8,) * 2, mode="bicubic").permute(0, 2, 3, 1).reshape(1, -1, 12)
    new = model.base_model.embeddings.position_embeddings
    torch.testing.assert_close(new.detach(), torch.cat([old[:, :extra], resized], dim=1))
    assert new.requires_grad
    model.save_pretrained(tmp_path / "resized")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "resized")
    assert loaded.config.image_size == image_size
    with torch.no_grad():
        assert torch.equal(loaded.eval()(pixels).logits, model(pixels).logits)


def test_a_saved_model_and_its_processor_are_a_pipeline(checkpoint, tmp_path):
    folder, _ = checkpoint()
    model = build_deit("lambda_gelu", DATA, ModelOptions(pretrained=folder, image_size=48)).eval()
    model.save_pretrained(tmp_path / "saved")
    processor = image_processor(48)
    processor.save_pretrained(tmp_path / "saved")
    picture = Image.effect_noise((64, 64), 80).convert("RGB")
    answers = pipeline("image-classification", model=str(tmp_path / "saved"), device="cpu")(picture)
    with torch.no_grad():
        chances = model(**processor(picture, return_tensors="pt")).logits.softmax(dim=1)[0].tolist()
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(
        dict(zip(DATA.label_names, chances, strict=True)), abs=1e-6
    )


def test_other_checkpoints_and_sizes_are_refused(checkpoint, tmp_path):
    folder, _ = checkpoint()
    with pytest.raises(ValueError, match="has patches of 8 pixels, got patch_size 4"):
        build_deit("gelu", DATA, ModelOptions(pretrained=folder, image_size=32, patch_size=4))
    with pytest.raises(ValueError, match="divisible by the patch size, 8, got 30; take 24 or 32"):
        build_deit("gelu", DATA, ModelOptions(pretrained=folder, image_size=30))
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="is a gpt2; a vision transformer such as facebook/deit-tiny"):
        build_deit("gelu", DATA, ModelOptions(pretrained=str(tmp_path / "gpt2")))
