"""λ-GELU for the Hugging Face ecosystem.

Importing this package registers "lambda_gelu", "lambda_gelu_tanh" and "lambda_silu" with transformers and timm, and the
MLP with transformers' Auto classes. It extends four methods of PreTrainedModel, so that λ is initialized in every
loading and a saved config says what the gates are. All this in the moment in which either is imported, before or
after. Everything else is loaded on first use (PEP 562).
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_lgelu.host_imports import when_imported
from hf_lgelu.version import __version__

if TYPE_CHECKING:
    from hf_lgelu.activation.functional import lambda_gelu as lambda_gelu
    from hf_lgelu.activation.functional import lambda_gelu_tanh as lambda_gelu_tanh
    from hf_lgelu.activation.functional import lambda_silu as lambda_silu
    from hf_lgelu.activation.hardness import hardness_for_tolerance as hardness_for_tolerance
    from hf_lgelu.activation.hardness import swap_error_bound as swap_error_bound
    from hf_lgelu.activation.kernels import use_kernel as use_kernel
    from hf_lgelu.activation.module import LambdaGELU as LambdaGELU
    from hf_lgelu.activation.module import LambdaGELUTanh as LambdaGELUTanh
    from hf_lgelu.activation.module import LambdaSiLU as LambdaSiLU
    from hf_lgelu.activation.report import kernel_report as kernel_report
    from hf_lgelu.export.absorption.absorb import absorb_hardness as absorb_hardness
    from hf_lgelu.export.hub.card import write_card as write_card
    from hf_lgelu.export.hub.loading import attach_model_code as attach_model_code
    from hf_lgelu.export.hub.push import push_to_hub as push_to_hub
    from hf_lgelu.export.int8.compare import compare_onnx as compare_onnx
    from hf_lgelu.export.int8.equalize import equalize_ranges as equalize_ranges
    from hf_lgelu.export.int8.quantize import quantize_onnx as quantize_onnx
    from hf_lgelu.export.onnx.onnx_export import export_onnx as export_onnx
    from hf_lgelu.export.plain import export_gelu as export_gelu
    from hf_lgelu.export.plain import export_relu as export_relu
    from hf_lgelu.models.config_keys import UnsupportedConfigError as UnsupportedConfigError
    from hf_lgelu.models.exchange import SurgeryReport as SurgeryReport
    from hf_lgelu.models.hardening import anneal_hardness as anneal_hardness
    from hf_lgelu.models.hardening import freeze_hardness as freeze_hardness
    from hf_lgelu.models.hardening import hardness_profile as hardness_profile
    from hf_lgelu.models.hardening import initialize_hardness as initialize_hardness
    from hf_lgelu.models.hardening import is_hardened as is_hardened
    from hf_lgelu.models.hardening import release_hardness as release_hardness
    from hf_lgelu.models.loading import from_pretrained as from_pretrained
    from hf_lgelu.models.mlp import MLPConfig as MLPConfig
    from hf_lgelu.models.mlp import MLPForClassification as MLPForClassification
    from hf_lgelu.models.operable import hardness_modules_to_save as hardness_modules_to_save
    from hf_lgelu.models.optimizer_groups import hardness_parameter_groups as hardness_parameter_groups
    from hf_lgelu.models.optimizer_groups import separate_hardness_group as separate_hardness_group
    from hf_lgelu.models.runtimes import RUNTIMES as RUNTIMES
    from hf_lgelu.models.runtimes import runtime_warnings as runtime_warnings
    from hf_lgelu.models.schedules import hardening_progress as hardening_progress
    from hf_lgelu.models.smooth_calls import find_smooth_calls as find_smooth_calls
    from hf_lgelu.models.substitution import substitute_relu as substitute_relu
    from hf_lgelu.models.substitution import temporary_relu as temporary_relu
    from hf_lgelu.models.surgery import replace_activations as replace_activations
    from hf_lgelu.refit.config import ConversionConfig as ConversionConfig
    from hf_lgelu.refit.convert import Conversion as Conversion
    from hf_lgelu.refit.convert import convert_to_relu as convert_to_relu
    from hf_lgelu.refit.gate_costs import gate_costs as gate_costs
    from hf_lgelu.refit.report import ConversionReport as ConversionReport
    from hf_lgelu.refit.report import Evaluation as Evaluation
    from hf_lgelu.refit.report import LayerRefit as LayerRefit
    from hf_lgelu.refit.report import NetChange as NetChange
    from hf_lgelu.refit.verdict import ConversionRefusedError as ConversionRefusedError
    from hf_lgelu.registry import register_activation as register_activation
    from hf_lgelu.training.arguments import HardeningConfig as HardeningConfig
    from hf_lgelu.training.arguments import LambdaGELUTrainingArguments as LambdaGELUTrainingArguments
    from hf_lgelu.training.callbacks import HardeningCallback as HardeningCallback
    from hf_lgelu.training.callbacks import HardnessLogCallback as HardnessLogCallback
    from hf_lgelu.training.layer_targets import layer_targets as layer_targets
    from hf_lgelu.training.trainer import LambdaGELUTrainer as LambdaGELUTrainer
    from hf_lgelu.version import __version__ as __version__

# Where each public name lives, below hf_lgelu.
_HOME = {
    "Conversion": "refit.convert",
    "ConversionConfig": "refit.config",
    "ConversionRefusedError": "refit.verdict",
    "ConversionReport": "refit.report",
    "Evaluation": "refit.report",
    "HardeningCallback": "training.callbacks",
    "HardeningConfig": "training.arguments",
    "HardnessLogCallback": "training.callbacks",
    "LambdaGELU": "activation.module",
    "LambdaGELUTanh": "activation.module",
    "LambdaGELUTrainer": "training.trainer",
    "LambdaGELUTrainingArguments": "training.arguments",
    "LambdaSiLU": "activation.module",
    "LayerRefit": "refit.report",
    "MLPConfig": "models.mlp",
    "MLPForClassification": "models.mlp",
    "NetChange": "refit.report",
    "RUNTIMES": "models.runtimes",
    "SurgeryReport": "models.exchange",
    "UnsupportedConfigError": "models.config_keys",
    "__version__": "version",
    "anneal_hardness": "models.hardening",
    "attach_model_code": "export.hub.loading",
    "compare_onnx": "export.int8.compare",
    "convert_to_relu": "refit.convert",
    "equalize_ranges": "export.int8.equalize",
    "export_gelu": "export.plain",
    "export_onnx": "export.onnx.onnx_export",
    "export_relu": "export.plain",
    "find_smooth_calls": "models.smooth_calls",
    "absorb_hardness": "export.absorption.absorb",
    "freeze_hardness": "models.hardening",
    "from_pretrained": "models.loading",
    "gate_costs": "refit.gate_costs",
    "hardening_progress": "models.schedules",
    "hardness_for_tolerance": "activation.hardness",
    "hardness_modules_to_save": "models.operable",
    "hardness_parameter_groups": "models.optimizer_groups",
    "hardness_profile": "models.hardening",
    "initialize_hardness": "models.hardening",
    "is_hardened": "models.hardening",
    "kernel_report": "activation.report",
    "lambda_gelu": "activation.functional",
    "lambda_gelu_tanh": "activation.functional",
    "lambda_silu": "activation.functional",
    "layer_targets": "training.layer_targets",
    "push_to_hub": "export.hub.push",
    "quantize_onnx": "export.int8.quantize",
    "register_activation": "registry",
    "release_hardness": "models.hardening",
    "replace_activations": "models.surgery",
    "runtime_warnings": "models.runtimes",
    "separate_hardness_group": "models.optimizer_groups",
    "substitute_relu": "models.substitution",
    "swap_error_bound": "activation.hardness",
    "temporary_relu": "models.substitution",
    "use_kernel": "activation.kernels",
    "write_card": "export.hub.card",
}

__all__ = [
    "RUNTIMES",
    "Conversion",
    "ConversionConfig",
    "ConversionRefusedError",
    "ConversionReport",
    "Evaluation",
    "HardeningCallback",
    "HardeningConfig",
    "HardnessLogCallback",
    "LambdaGELU",
    "LambdaGELUTanh",
    "LambdaGELUTrainer",
    "LambdaGELUTrainingArguments",
    "LambdaSiLU",
    "LayerRefit",
    "MLPConfig",
    "MLPForClassification",
    "NetChange",
    "SurgeryReport",
    "UnsupportedConfigError",
    "__version__",
    "absorb_hardness",
    "anneal_hardness",
    "attach_model_code",
    "compare_onnx",
    "convert_to_relu",
    "equalize_ranges",
    "export_gelu",
    "export_onnx",
    "export_relu",
    "find_smooth_calls",
    "freeze_hardness",
    "from_pretrained",
    "gate_costs",
    "hardening_progress",
    "hardness_for_tolerance",
    "hardness_modules_to_save",
    "hardness_parameter_groups",
    "hardness_profile",
    "initialize_hardness",
    "is_hardened",
    "kernel_report",
    "lambda_gelu",
    "lambda_gelu_tanh",
    "lambda_silu",
    "layer_targets",
    "push_to_hub",
    "quantize_onnx",
    "register_activation",
    "release_hardness",
    "replace_activations",
    "runtime_warnings",
    "separate_hardness_group",
    "substitute_relu",
    "swap_error_bound",
    "temporary_relu",
    "use_kernel",
    "write_card",
]


# What has to be done to a module of a host library: (its name, where the function is, below hf_lgelu, the function).
_REGISTRATIONS = (
    ("transformers.activations", "registry", "register_in_transformers"),
    ("timm.layers.create_act", "registry", "register_in_timm"),
    ("transformers.modeling_utils", "models.loading", "extend_from_pretrained"),
    ("transformers.models.auto.configuration_auto", "registry", "register_auto_classes"),
    ("transformers.models.auto.modeling_auto", "registry", "register_auto_classes"),
    ("transformers.modeling_utils", "registry", "register_auto_classes"),
    ("transformers.modeling_layers", "registry", "register_auto_classes"),
)


def _deferred(home: str, name: str) -> Callable[[], None]:
    return lambda: getattr(importlib.import_module(f"hf_lgelu.{home}"), name)()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hf_lgelu.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


for _module, _home, _function in _REGISTRATIONS:
    when_imported(_module, _deferred(_home, _function))
