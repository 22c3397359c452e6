"""The refusals that users meet most, each by a call that brings it."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from networks import NETWORKS, TEXT, convert_with
from torch import nn
from torch.nn import functional as F

import hf_lgelu
from hf_lgelu import convert_to_relu, replace_activations, substitute_relu


def _folder() -> str:
    return tempfile.mkdtemp()


def _rows(count: int = 96) -> torch.Tensor:
    return NETWORKS["mlp"].inputs(count)


def _mlp() -> nn.Module:
    return NETWORKS["mlp"].model()


def _lambda_mlp(**options: Any) -> hf_lgelu.MLPForClassification:
    torch.manual_seed(0)
    return hf_lgelu.MLPForClassification(
        hf_lgelu.MLPConfig(num_features=6, hidden_size=8, num_hidden_layers=2, **options)
    )


class _Behind(nn.Module):
    """up → gate → whatever a function does with the gate's output."""

    def __init__(self, behind: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down, self.head = nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 7), nn.Linear(7, 3)
        self.spare = nn.SiLU()
        self._behind = behind
        self.double().eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self._behind(self, self.act(self.up(x)))


class _Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7).double(), nn.Linear(7, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def _tied() -> nn.Module:
    model = _Behind(lambda net, x: net.head(net.down(x)))
    model.spare = nn.Linear(7, 7).double()
    model.spare.weight = model.down.weight
    return model


def _not_finite() -> torch.Tensor:
    inputs = _rows()
    inputs[::3, 0] = float("nan")
    return inputs


def _half_text() -> dict[str, torch.Tensor]:
    inputs = NETWORKS["bert padded right"].inputs()
    return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"][:40]}


def _fitted(model: nn.Module, inputs: Any, **options: Any) -> Callable[[], Any]:
    return lambda: convert_with(model, inputs, **options)


def _trainer(model: nn.Module, **options: Any) -> Callable[[], Any]:
    def train() -> None:
        own = {key: options.pop(key) for key in ("callbacks", "optimizers") if key in options}
        arguments = hf_lgelu.LambdaGELUTrainingArguments(
            _folder(), num_train_epochs=1, use_cpu=True, report_to=[], disable_tqdm=True, **options
        )
        rows = [{"features": torch.randn(6), "labels": i % 2} for i in range(8)]
        hf_lgelu.LambdaGELUTrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, **own).train()

    return train


def _frozen() -> nn.Module:
    model = _lambda_mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("raw_hardness" not in name)
    return model


def _full_folder(model: nn.Module) -> None:
    folder = _folder()
    Path(folder, "model.safetensors").write_text("x")
    hf_lgelu.anneal_hardness(model, 1.0)
    hf_lgelu.export_relu(model, folder)


def _exported_soft_gelu() -> None:
    hf_lgelu.export_gelu(_lambda_mlp(hidden_act="gelu"), _folder())


def _guarded() -> None:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
    replace_activations(model, granularity="channel", inputs={"input_ids": torch.ones(1, 4, dtype=torch.long)})
    transformers.BertForSequenceClassification(model.config)(torch.ones(1, 4, dtype=torch.long))


REFUSALS: dict[str, Callable[[], Any]] = {
    # Conversion: what a network is.
    "convert: no gate": _fitted(nn.Sequential(nn.Linear(6, 3)).double(), _rows()),
    "convert: called as a function": _fitted(_Calls(), _rows()),
    "convert: shared map": _fitted(_Behind(lambda net, x: net.head(net.down(net.down(x)))), _rows()),
    "convert: tied map": _fitted(_tied(), _rows()),
    "convert: gate at the output": _fitted(_Behind(lambda net, x: x.softmax(-1)), _rows()),
    "convert: gate never reached": _fitted(_Behind(lambda net, x: net.head(x)), _rows()),
    "convert: a function": lambda: convert_to_relu(torch.relu, _rows()),
    "convert: scripted": lambda: convert_to_relu(torch.jit.trace(_mlp(), _rows()), _rows()),
    # Conversion: what data are.
    "convert: too few rows": _fitted(_mlp(), _rows(9)),
    "convert: repeated rows": _fitted(_mlp(), _rows(3).repeat(40, 1)),
    "convert: not finite": _fitted(_mlp(), _not_finite()),
    "convert: tensors of two lengths": _fitted(NETWORKS["bert padded right"].model(), _half_text()),
    "convert: strings": _fitted(NETWORKS["gpt2"].model(), ["a text", "another text"] * 20),
    "convert: wrong width": _fitted(_mlp(), torch.randn(96, 5, dtype=torch.float64)),
    # Conversion: what is asked for.
    "convert: unknown kind": _fitted(_mlp(), _rows(), kinds=("gelus",)),
    "convert: unknown target": _fitted(_mlp(), _rows(), target="relu7"),
    "convert: unknown effort": _fitted(_mlp(), _rows(), effort="most"),
    "convert: unknown output": _fitted(NETWORKS["vit"].model(), NETWORKS["vit"].inputs(), outputs=("logit",)),
    "convert: unknown gate to keep": _fitted(_mlp(), _rows(), keep=("act",)),
    "convert: narrower": _fitted(_mlp(), _rows(), width=0.5),
    "convert: wider for relu6": _fitted(_mlp(), _rows(), width=1.5, target="relu6"),
    "convert: too far": _fitted(_mlp(), _rows(), max_kl=1e-9, strict=True),
    # Surgery.
    "surgery: nothing to replace": lambda: replace_activations(nn.Sequential(nn.Linear(6, 3), nn.ReLU())),
    "surgery: called as a function": lambda: replace_activations(_Calls()),
    "surgery: unknown gate": lambda: replace_activations(_mlp(), gate="lambda_mish"),
    "surgery: channels without inputs": lambda: replace_activations(_mlp(), granularity="channel"),
    "surgery: λ of 1": lambda: replace_activations(_mlp(), init_hardness=1.0),
    "surgery: no λ-gate": lambda: substitute_relu(_mlp()),
    "surgery: no key": lambda: substitute_relu(
        transformers.MptForCausalLM(transformers.MptConfig(vocab_size=32, d_model=16, n_heads=2, n_layers=1)),
        kinds=("gelu",),
    ),
    "surgery: built from a config of channels": _guarded,
    # Training.
    "train: no λ-gate": _trainer(_lambda_mlp(hidden_act="gelu")),
    "train: frozen s": _trainer(_frozen(), harden=True),
    "train: idle option": _trainer(_lambda_mlp(), target_hardness=40.0),
    "train: unknown schedule": _trainer(_lambda_mlp(), harden=True, hardening_schedule="cubic"),
    "train: a target below 1": _trainer(_lambda_mlp(), harden=True, target_hardness=0.5),
    "train: anneal past the end": lambda: hf_lgelu.anneal_hardness(_lambda_mlp(), 1.5),
    # Export.
    "export: soft gates": lambda: hf_lgelu.export_relu(_lambda_mlp(), _folder()),
    "export: no λ-gate": lambda: hf_lgelu.export_relu(_lambda_mlp(hidden_act="gelu"), _folder()),
    "export: no transformers model": lambda: hf_lgelu.export_relu(_mlp(), _folder()),
    "export: a folder with files": lambda: _full_folder(_lambda_mlp()),
    "export: GELU of GELU": _exported_soft_gelu,
    "export: half precision to ONNX": lambda: hf_lgelu.export_onnx(
        _mlp().half(), Path(_folder(), "x.onnx"), _rows(4).half()
    ),
}
