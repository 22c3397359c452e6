"""λ-GELU in a model that trains an adapter of PEFT."""

from torch import nn

from hf_lgelu.activation.module import SharedLambdaGate
from hf_lgelu.models.sites import find_sites, require_lambda_gelu


def hardness_modules_to_save(model: nn.Module) -> list[str]:
    """The names of all λ-GELU modules, for `modules_to_save` of a PEFT config.

    `get_peft_model` freezes every parameter that the adapter does not own, s too, and an adapter's checkpoint holds
    no λ. Named in `modules_to_save`, each λ-GELU trains beside the adapter, is saved with it, comes back with it,
    and stays after `merge_and_unload`, from where `substitute_relu` goes on. `model` stays as it is.

    Raises ValueError for a model without λ-GELU, and for granularity "network", whose sites share one s: PEFT
    copies each module for itself.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> import hf_lgelu
    >>> sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "bos_token_id": 0, "eos_token_id": 0}
    >>> model = GPT2LMHeadModel(GPT2Config(activation_function="lambda_gelu", **sizes))
    >>> hf_lgelu.hardness_modules_to_save(model)
    ['transformer.h.0.mlp.act']
    """
    names = [name for name, _ in require_lambda_gelu(model)]
    shared = [site.name for site in find_sites(model) if isinstance(site.module, SharedLambdaGate)]
    if shared:
        raise ValueError(
            f"{', '.join(shared[:4])} share the hardness of {names[0]} (granularity 'network'), and PEFT would copy "
            "each for itself; use granularity 'layer', 'channel' or 'neuron' with adapters"
        )
    return names
