"""λ-GELU for the Hugging Face ecosystem.

Importing this package registers "lambda_gelu", "lambda_gelu_tanh" and "lambda_silu" with transformers and timm, and the
MLP with transformers' Auto classes. It extends six methods of PreTrainedModel, one of ModelHubMixin and one of
diffusers, so that λ is initialized in every loading, gates that no config key can say are rebuilt, and a saved config
says what the gates are. It does so when a library is imported, before or after. All else loads on first use (PEP 562).
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_lgelu.version import __version__

if TYPE_CHECKING:
    from hf_lgelu.activation.functional import lambda_gelu as lambda_gelu
    from hf_lgelu.activation.functional import lambda_silu as lambda_silu
    from hf_lgelu.activation.module import LambdaGELU as LambdaGELU
    from hf_lgelu.activation.module import LambdaSiLU as LambdaSiLU
    from hf_lgelu.export.absorption.absorb import absorb_hardness as absorb_hardness
    from hf_lgelu.export.comparison import compare_networks as compare_networks
    from hf_lgelu.export.hub.push import push_to_hub as push_to_hub
    from hf_lgelu.export.int8.quantize import quantize_onnx as quantize_onnx
    from hf_lgelu.export.onnx.onnx_export import export_onnx as export_onnx
    from hf_lgelu.export.plain import export_gelu as export_gelu
    from hf_lgelu.export.plain import export_relu as export_relu
    from hf_lgelu.models.config_keys import UnsupportedConfigError as UnsupportedConfigError
    from hf_lgelu.models.hardening import anneal_hardness as anneal_hardness
    from hf_lgelu.models.hardening import freeze_hardness as freeze_hardness
    from hf_lgelu.models.hardening import hardness_profile as hardness_profile
    from hf_lgelu.models.hardening import initialize_hardness as initialize_hardness
    from hf_lgelu.models.loading import from_pretrained as from_pretrained
    from hf_lgelu.models.mlp import MLPConfig as MLPConfig
    from hf_lgelu.models.mlp import MLPForClassification as MLPForClassification
    from hf_lgelu.models.optimizer_groups import hardness_parameter_groups as hardness_parameter_groups
    from hf_lgelu.models.smooth_calls import find_smooth_calls as find_smooth_calls
    from hf_lgelu.models.surgery import replace_activations as replace_activations
    from hf_lgelu.models.surgery import substitute_relu as substitute_relu
    from hf_lgelu.refit.config import ConversionConfig as ConversionConfig
    from hf_lgelu.refit.convert import convert_to_relu as convert_to_relu
    from hf_lgelu.refit.verdict import ConversionRefusedError as ConversionRefusedError
    from hf_lgelu.training.arguments import HardeningConfig as HardeningConfig
    from hf_lgelu.training.arguments import LambdaGELUTrainingArguments as LambdaGELUTrainingArguments
    from hf_lgelu.training.callbacks import HardeningCallback as HardeningCallback
    from hf_lgelu.training.callbacks import HardnessLogCallback as HardnessLogCallback
    from hf_lgelu.training.trainer import LambdaGELUTrainer as LambdaGELUTrainer
    from hf_lgelu.version import __version__ as __version__

# The public names, by the module where they live, below hf_lgelu.
_PUBLIC = {
    "activation.functional": ("lambda_gelu", "lambda_silu"),
    "activation.module": ("LambdaGELU", "LambdaSiLU"),
    "export.absorption.absorb": ("absorb_hardness",),
    "export.comparison": ("compare_networks",),
    "export.hub.push": ("push_to_hub",),
    "export.int8.quantize": ("quantize_onnx",),
    "export.onnx.onnx_export": ("export_onnx",),
    "export.plain": ("export_gelu", "export_relu"),
    "models.config_keys": ("UnsupportedConfigError",),
    "models.hardening": ("anneal_hardness", "freeze_hardness", "hardness_profile", "initialize_hardness"),
    "models.loading": ("from_pretrained",),
    "models.mlp": ("MLPConfig", "MLPForClassification"),
    "models.optimizer_groups": ("hardness_parameter_groups",),
    "models.smooth_calls": ("find_smooth_calls",),
    "models.surgery": ("replace_activations", "substitute_relu"),
    "refit.config": ("ConversionConfig",),
    "refit.convert": ("convert_to_relu",),
    "refit.verdict": ("ConversionRefusedError",),
    "training.arguments": ("HardeningConfig", "LambdaGELUTrainingArguments"),
    "training.callbacks": ("HardeningCallback", "HardnessLogCallback"),
    "training.trainer": ("LambdaGELUTrainer",),
    "version": ("__version__",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOME)


# What has to be done to a module of a host library: (its name, where the function is, below hf_lgelu, the function).
_REGISTRATIONS = (
    ("transformers.activations", "registry", "register_activation"),
    ("timm.layers.create_act", "registry", "register_activation"),
    ("transformers.modeling_utils", "models.loading", "extend_from_pretrained"),
    ("diffusers.configuration_utils", "models.loading", "extend_from_config"),
    ("transformers.models.auto.configuration_auto", "registry", "register_auto_classes"),
    ("transformers.models.auto.modeling_auto", "registry", "register_auto_classes"),
    ("transformers.modeling_utils", "registry", "register_auto_classes"),
    ("transformers.modeling_layers", "registry", "register_auto_classes"),
)


def _act(module: str) -> None:
    """Do what has to be done to an imported module; again where it is reloaded."""
    for awaited, home, function in _REGISTRATIONS:
        if awaited == module:
            getattr(importlib.import_module(f"hf_lgelu.{home}"), function)()


class _Watch(MetaPathFinder):
    """A finder that takes a spec from the other finders, and has the loader of an awaited module act at its end.

    So the additions are in place before a library builds a model, and no library is imported ahead of its user.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if all(awaited != fullname for awaited, _, _ in _REGISTRATIONS):
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _act(fullname)

            loader.exec_module = exec_module
        return spec


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hf_lgelu.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


sys.meta_path[:] = [_Watch(), *(finder for finder in sys.meta_path if type(finder).__module__ != __name__)]
for _module in dict.fromkeys(awaited for awaited, _, _ in _REGISTRATIONS):
    if _module in sys.modules:
        importlib.import_module(_module)  # waits for another thread that is just importing it
        _act(_module)
