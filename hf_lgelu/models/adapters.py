"""λ-GELU in a model that trains an adapter of PEFT."""

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.config_keys import gate_names
from hf_lgelu.models.origin import forget_checkpoint, written_gates
from hf_lgelu.models.site_record import has_record
from hf_lgelu.models.sites import find_sites, require_lambda_gelu

logger = logging.get_logger(__name__)


def hardness_modules_to_save(model: nn.Module) -> list[str]:
    """The names of all λ-GELU modules, for `modules_to_save` of a PEFT config.

    `get_peft_model` freezes every parameter that the adapter does not own, s too, and an adapter's checkpoint holds
    no λ. Named in `modules_to_save`, each λ-GELU trains beside the adapter, is saved with it, comes back with it,
    and stays after `merge_and_unload` of LoRA, DoRA and AdaLoRA, from where `substitute_relu` goes on. PEFT's other
    methods cannot merge beside a saved module that has no weight; docs/families.md has the lines that help.

    Experts whose weights are one tensor (Mixtral and other mixtures) and that the adapter takes by `target_parameters`
    are put into a wrapper of PEFT, where it finds no gate by these names: λ is not learned then, and training says so.

    Changes `model` in place, though not what it computes: where it was loaded from a checkpoint whose config does not
    say these gates (the activation string was given to `from_pretrained`), it forgets where, and a warning says so.
    PEFT would name that as the adapter's base, load the plain network by that name, and leave every λ out without a
    word. Such an adapter is loaded with `PeftModel.from_pretrained(base, adapter)` on a base that has the gates.

    Raises ValueError for a model without λ-GELU, and where one λ-gate stands at several places: PEFT copies each for
    itself.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> import hf_lgelu
    >>> sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "bos_token_id": 0, "eos_token_id": 0}
    >>> model = GPT2LMHeadModel(GPT2Config(activation_function="lambda_gelu", **sizes))
    >>> hf_lgelu.hardness_modules_to_save(model)
    ['transformer.h.0.mlp.act']
    """
    names = [name for name, _ in require_lambda_gelu(model)]
    own = [site.name for site in find_sites(model) if isinstance(site.module, LambdaGate)]
    several = [name for name in own if name not in names]
    if several:
        raise ValueError(
            f"the λ-gate at {', '.join(several[:4])} stands at another place too, and PEFT would copy it for that one "
            "alone: these would go back to the λ of the base. Give each place a gate of its own, or train without an "
            "adapter"
        )
    if isinstance(model, PreTrainedModel):
        _forget_plain_checkpoint(model)
    return names


def _forget_plain_checkpoint(model: PreTrainedModel) -> None:
    """Also where the config's file is not found again, and nobody knows what it says."""
    built, written = gate_names(model.config.to_json_string()), written_gates(model) or set()
    if not model.name_or_path or has_record(model.config) or (built and built <= written):
        return
    logger.warning(
        f"the config in {model.name_or_path} is not known to say {', '.join(sorted(built)) or 'λ-gates'}, so an "
        "adapter of this model names no base: loaded by that name, the base would have other activations. Load the "
        "base with the activation string again, and the adapter with PeftModel.from_pretrained(base, adapter)"
    )
    forget_checkpoint(model)
