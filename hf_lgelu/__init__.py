"""λ-GELU for the Hugging Face ecosystem.

Importing this package registers the activation "lambda_gelu" with transformers and, where it is
installed, timm.
"""

from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.hardness import hardness_target, swap_error_bound
from hf_lgelu.activation.module import LambdaGELU
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
    "find_smooth_calls",
    "freeze_hardness",
    "from_pretrained",
    "hardening_progress",
    "hardness_parameter_groups",
    "hardness_profile",
    "hardness_target",
    "initialize_hardness",
    "is_hardened",
    "lambda_gelu",
    "register_activation",
    "release_hardness",
    "relu_substitution",
    "replace_activations",
    "separate_hardness_group",
    "substitute_relu",
    "swap_error_bound",
]
