"""λ-GELU for the Hugging Face ecosystem.

Importing this package registers the activation "lambda_gelu" with transformers and, where it is
installed, timm.
"""

from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.hardness import hardness_target, swap_error_bound
from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.models.loading import extend_from_pretrained
from hf_lgelu.models.profile import hardness_profile, initialize_hardness
from hf_lgelu.models.rebuild import from_pretrained
from hf_lgelu.models.registry import register_activation
from hf_lgelu.models.smooth_calls import find_smooth_calls
from hf_lgelu.models.surgery import SurgeryReport, relu_substitution, replace_activations, substitute_relu
from hf_lgelu.version import __version__

register_activation()
extend_from_pretrained()

__all__ = [
    "LambdaGELU",
    "SurgeryReport",
    "__version__",
    "find_smooth_calls",
    "from_pretrained",
    "hardness_profile",
    "hardness_target",
    "initialize_hardness",
    "lambda_gelu",
    "register_activation",
    "relu_substitution",
    "replace_activations",
    "substitute_relu",
    "swap_error_bound",
]
