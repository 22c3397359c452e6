"""A multilayer perceptron for table rows and flattened images, as a transformers model."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, initialization
from transformers.activations import get_activation
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple


class MLPConfig(PreTrainedConfig):
    """Shape of an `MLPForClassification`; the defaults are the paper's MLP (arXiv:2603.21991): 4 × 256.

    Args:
        num_features: columns of the input, e.g. 784 for a flattened 28x28 image. Required.
        hidden_size: units of each hidden layer.
        num_hidden_layers: hidden layers, each with an activation of its own.
        hidden_act: a key of transformers' `ACT2FN`; importing `hf_lgelu` adds "lambda_gelu".
        num_labels: classes, at least 2 (the base class's argument; `id2label` gives them names).

    >>> import hf_lgelu
    >>> hf_lgelu.MLPConfig(num_features=14, hidden_act="relu").num_hidden_layers
    4
    """

    model_type = "lgelu_mlp"
    has_no_defaults_at_init = True  # saving must not build a config without num_features, which is required

    num_features: int
    hidden_size: int = 256
    num_hidden_layers: int = 4
    hidden_act: str = "lambda_gelu"

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.num_labels < 2:
            raise ValueError(f"num_labels must be at least 2, one per class, got {self.num_labels}")


class MLPForClassification(PreTrainedModel):
    """A multilayer perceptron: `num_hidden_layers` times Linear and activation, then a Linear classifier.

    The activations are `layers.<i>.activation`, in the order in which they run.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_labels=3))
    >>> model(torch.zeros(5, 4)).logits.shape
    torch.Size([5, 3])
    """

    config: MLPConfig
    main_input_name = "features"
    # The loss is a mean over the batch. With a **kwargs in forward, Trainer would expect a loss divided by the rows of
    # all accumulated batches, and not divide again. This flag holds even if forward gets **kwargs later.
    accepts_loss_kwargs = False

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        sizes = [config.num_features, *[config.hidden_size] * config.num_hidden_layers]
        self.layers = nn.ModuleList(
            # A new activation each time, so each layer learns its own hardness.
            nn.ModuleDict({"linear": nn.Linear(*pair), "activation": get_activation(config.hidden_act)})
            for pair in pairwise(sizes)
        )
        self.classifier = nn.Linear(sizes[-1], config.num_labels)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights and biases of nn.Linear from U(−1/√in, 1/√in), torch's own default.

        The base class's normal distribution of std 0.02 is too narrow for SGD: at a width of 256 a layer gives back a
        third of its input's size, and the next layer a third of that. The functions of `transformers.initialization`
        skip a tensor that a checkpoint has filled.
        """
        if not isinstance(module, nn.Linear):
            super()._init_weights(module)
            return
        bound = 1 / math.sqrt(module.in_features)
        initialization.uniform_(module.weight, -bound, bound)
        initialization.uniform_(module.bias, -bound, bound)

    @can_return_tuple
    def forward(self, features: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Class scores of each row, (batch, num_labels), and their mean cross entropy if `labels` are given.

        `features` is (batch, num_features), floating point; images come flattened. `labels` is (batch,) int64.
        """
        if features.ndim != 2 or features.shape[1] != self.config.num_features:
            raise ValueError(
                f"features must have shape (batch, {self.config.num_features}), got {tuple(features.shape)}; "
                "flatten images with .flatten(1)"
            )
        # Not the weight's dtype: of quantized weights it is that of storage (int8), and features would be whole
        # numbers.
        hidden_states = features.to(self.layers[0].linear.bias.dtype)
        for layer in self.layers:
            hidden_states = layer.activation(layer.linear(hidden_states))
        logits = self.classifier(hidden_states)
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


# Not AutoModelForImageClassification or AutoModelForSequenceClassification: their pipelines give pixel values or token
# ids, while this model takes rows of features.
AutoConfig.register(MLPConfig.model_type, MLPConfig, exist_ok=True)
AutoModel.register(MLPConfig, MLPForClassification, exist_ok=True)
