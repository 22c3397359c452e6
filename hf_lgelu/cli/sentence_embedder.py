"""A network of sentence-transformers as one module that gives embeddings: what such networks are compared by."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class SentenceEmbedder(nn.Module):
    """An encoder of transformers and the modules behind it (pooling, dense layers, normalization).

    Its output is {"sentence_embedding": (N, D)}. The modules are those given, not copies.

    Args:
        encoder: what sentence-transformers calls the first module's `auto_model`.
        behind: its other modules in order; each takes a dict of features and adds to it.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        >>> class FirstToken(torch.nn.Module):
        ...     def forward(self, features):
        ...         return {**features, "sentence_embedding": features["token_embeddings"][:, 0]}
        >>> embedder = SentenceEmbedder(BertModel(BertConfig(vocab_size=9, **sizes)), [FirstToken()])
        >>> embedder(input_ids=torch.tensor([[1, 2, 3]]))["sentence_embedding"].shape
        torch.Size([1, 8])
    """

    main_input_name = "input_ids"

    def __init__(self, encoder: PreTrainedModel, behind: Sequence[nn.Module]) -> None:
        super().__init__()
        self.encoder = encoder
        self.behind = nn.ModuleList(behind)

    @property
    def config(self) -> PreTrainedConfig:
        """The encoder's."""
        return self.encoder.config

    @property
    def device(self) -> Any:
        """The encoder's."""
        return self.encoder.device

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        tensors = zip(_INPUTS, (input_ids, attention_mask, token_type_ids), strict=True)
        given = {name: tensor for name, tensor in tensors if tensor is not None}
        features = {**given, "token_embeddings": self.encoder(**given)[0]}
        for module in self.behind:
            features = module(features)
        return {"sentence_embedding": features["sentence_embedding"]}


def embedder_of(model: Any) -> SentenceEmbedder:
    """The modules of a `SentenceTransformer`, not copied.

    Raises ValueError if the first is no encoder of transformers.
    """
    first, *behind = model.children()
    encoder = getattr(first, "auto_model", None)
    if not isinstance(encoder, PreTrainedModel):
        raise ValueError(
            f"the first module of this SentenceTransformer, {type(first).__name__}, is no encoder of transformers: "
            "there are no gates in it to exchange"
        )
    return SentenceEmbedder(encoder, behind)
