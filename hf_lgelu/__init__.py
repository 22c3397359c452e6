"""λ-GELU for the Hugging Face ecosystem.

Importing this package registers the activation "lambda_gelu" with transformers and, where it is
installed, timm.
"""

from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.hardness import hardness_target, swap_error_bound
from hf_lgelu.activation.kernels.choice import use_kernel
from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.activation.report import kernel_report
from hf_lgelu.deploy.folding.fold import fold_hardness
from hf_lgelu.deploy.gelu import export_gelu
from hf_lgelu.deploy.hub.model_card import write_card
from hf_lgelu.deploy.hub.push import push_to_hub
from hf_lgelu.deploy.piecewise.certificate import certify_substitution
from hf_lgelu.deploy.piecewise.linear_pieces import local_linear_model
from hf_lgelu.deploy.pruning.units import prune_units, remove_dead_units
from hf_lgelu.deploy.pruning.zeros import measure_zeros
from hf_lgelu.deploy.refit.convert import ConversionRefusedError, convert_to_relu
from hf_lgelu.deploy.relu import export_relu
from hf_lgelu.deploy.runtime.int8 import quantize_onnx
from hf_lgelu.deploy.runtime.onnx_export import export_onnx
from hf_lgelu.deploy.verification.robustness import verify_robustness
from hf_lgelu.models.cifar_resnet import register_cifar_resnet
from hf_lgelu.models.loading import extend_from_pretrained
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification, register_auto_classes
from hf_lgelu.models.profile import hardness_profile, initialize_hardness
from hf_lgelu.models.rebuild import from_pretrained
from hf_lgelu.models.registry import register_activation
from hf_lgelu.models.smooth_calls import find_smooth_calls
from hf_lgelu.models.surgery import SurgeryReport, relu_substitution, replace_activations, substitute_relu
from hf_lgelu.training.arguments import LambdaGELUTrainingArguments
from hf_lgelu.training.callbacks import HardeningCallback, HardnessLogCallback
from hf_lgelu.training.hardening import anneal_hardness, freeze_hardness, is_hardened, release_hardness
from hf_lgelu.training.optim import hardness_parameter_groups, separate_hardness_group
from hf_lgelu.training.schedules import hardening_progress
from hf_lgelu.training.trainer import LambdaGELUTrainer
from hf_lgelu.version import __version__

register_activation()
extend_from_pretrained()
register_auto_classes()
register_cifar_resnet()

__all__ = [
    "ConversionRefusedError",
    "HardeningCallback",
    "HardnessLogCallback",
    "LambdaGELU",
    "LambdaGELUTrainer",
    "LambdaGELUTrainingArguments",
    "MLPConfig",
    "MLPForClassification",
    "SurgeryReport",
    "__version__",
    "anneal_hardness",
    "certify_substitution",
    "convert_to_relu",
    "export_gelu",
    "export_onnx",
    "export_relu",
    "find_smooth_calls",
    "fold_hardness",
    "freeze_hardness",
    "from_pretrained",
    "hardening_progress",
    "hardness_parameter_groups",
    "hardness_profile",
    "hardness_target",
    "initialize_hardness",
    "is_hardened",
    "kernel_report",
    "lambda_gelu",
    "local_linear_model",
    "measure_zeros",
    "prune_units",
    "push_to_hub",
    "quantize_onnx",
    "register_activation",
    "release_hardness",
    "relu_substitution",
    "remove_dead_units",
    "replace_activations",
    "separate_hardness_group",
    "substitute_relu",
    "swap_error_bound",
    "use_kernel",
    "verify_robustness",
    "write_card",
]
