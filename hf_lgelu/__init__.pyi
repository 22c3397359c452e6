"""The public names, by the module where each lives. `hf_lgelu/__init__.py` loads them on first use."""

from .activation.functional import lambda_gelu as lambda_gelu
from .activation.functional import lambda_silu as lambda_silu
from .activation.module import LambdaGELU as LambdaGELU
from .activation.module import LambdaSiLU as LambdaSiLU
from .export.comparison import compare_networks as compare_networks
from .export.int8 import export_int8 as export_int8
from .export.onnx_export import export_onnx as export_onnx
from .export.onnx_network import OnnxNetwork as OnnxNetwork
from .export.plain import export_gelu as export_gelu
from .export.plain import export_relu as export_relu
from .export.push import push_to_hub as push_to_hub
from .export.quantize import quantize_onnx as quantize_onnx
from .models.hardening import anneal_hardness as anneal_hardness
from .models.hardening import freeze_hardness as freeze_hardness
from .models.hardening import hardness_profile as hardness_profile
from .models.hardening import initialize_hardness as initialize_hardness
from .models.loading import from_pretrained as from_pretrained
from .models.mlp import MLPConfig as MLPConfig
from .models.mlp import MLPForClassification as MLPForClassification
from .models.optimizer_groups import hardness_parameter_groups as hardness_parameter_groups
from .models.surgery import replace_activations as replace_activations
from .models.surgery import substitute_relu as substitute_relu
from .networks.smooth_calls import find_smooth_calls as find_smooth_calls
from .refit.config import ConversionConfig as ConversionConfig
from .refit.convert import convert_to_relu as convert_to_relu
from .refit.refusals import ConversionRefusedError as ConversionRefusedError
from .training.arguments import HardeningConfig as HardeningConfig
from .training.arguments import LambdaGELUTrainingArguments as LambdaGELUTrainingArguments
from .training.callbacks import HardeningCallback as HardeningCallback
from .training.callbacks import HardnessLogCallback as HardnessLogCallback
from .training.trainer import LambdaGELUTrainer as LambdaGELUTrainer

__version__: str
