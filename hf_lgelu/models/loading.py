"""λ-gates in transformers' `from_pretrained` and `save_pretrained`: methods of PreTrainedModel, each extended.

`from_pretrained` builds a model without memory and fills in the tensors of the checkpoint. Every other tensor is
uninitialized memory, which the model's own `_init_weights` is expected to set. No model's knows λ-gates: s would be
garbage, mostly a huge negative number, which is a GELU that never learns. There is no public hook for a module, so
`_initialize_weights` is extended, and `_adjust_missing_and_unexpected_keys`, which reports what is new.

A config whose record has gates that no key can say (`record.py`) builds the network without them. `__init__` and
`get_init_context`, inside which `from_pretrained` builds the model, put these gates in.

`save_pretrained` renews that record first: a layer may have been dropped since surgery, or a part changed by itself.
`get_expanded_tied_weights_keys` says which weights are tied: λ of two blocks that share their weights is not.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from huggingface_hub import ModelHubMixin, try_to_load_from_cache
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import CONFIG_NAME, logging

from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.module import LambdaGate, state_problem
from hf_lgelu.models.config_keys import (
    EXCHANGED,
    activation_strings,
    apply_changes,
    config_entries,
    gate_names,
    write_changes,
)
from hf_lgelu.models.record import (
    GUARDS_KEY,
    RECORD_KEY,
    guard_code,
    has_record,
    is_guarded,
    rebuild_gates,
    recorded_models,
    renew_records,
    require_own_record,
    require_whole_config,
    without_guard,
)
from hf_lgelu.models.sites import lambda_gelu_modules

logger = logging.get_logger(__name__)

_EXTENDED = "_extended_by_hf_lgelu"
_SAME_FUNCTION = 0.01  # the tanh form of GELU is within 0.0005 of the other
_STATE = ("raw_hardness", "temperature", "hardness_override")


def from_pretrained(model_class: Any, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Any:
    """`model_class.from_pretrained(...)`, which rebuilds every λ-gate once this package is imported.

    Code that loads a checkpoint by this name says that it needs the package: for gates that the activation string alone
    cannot say (granularity "channel", a config without an activation key, a conversion that kept some gates).
    `model_class` is a class of transformers, also an Auto class, or of diffusers. As in transformers, a checkpoint may
    be loaded with another head or without one.

    Raises ValueError for a model with none of the places where the checkpoint has λ-gates.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, hidden_act="gelu"))
    >>> _ = hf_lgelu.replace_activations(model, granularity="channel", inputs=torch.zeros(1, 4))
    >>> model.save_pretrained("soft")
    >>> loaded = hf_lgelu.from_pretrained(hf_lgelu.MLPForClassification, "soft")
    >>> loaded.layers[0].activation.hardness.shape
    torch.Size([8])
    """
    return model_class.from_pretrained(pretrained_model_name_or_path, **kwargs)


def extend_from_pretrained() -> None:
    """Make transformers' loading and saving know λ-gates. Idempotent; `import hf_lgelu` calls it."""
    for name, extension in (
        ("__init__", _note_construction),
        ("get_init_context", lambda original, *args, **kwargs: [*original(*args, **kwargs), _gates_rebuilt()]),
        ("_initialize_weights", _initialize_lambda_gelu),
        ("_adjust_missing_and_unexpected_keys", _report_lambda_gelu_keys),
        ("save_pretrained", _keep_records_true),
        ("get_expanded_tied_weights_keys", _keep_gates_untied),
    ):
        _extend(PreTrainedModel, name, extension)
    _extend(ModelHubMixin, "save_pretrained", _tell_gates_of_code)


def extend_from_config() -> None:
    """Make diffusers' loading put in the gates of a record. Idempotent; called once diffusers is imported."""
    _extend(sys.modules["diffusers.configuration_utils"].ConfigMixin, "from_config", _rebuild_from_config)


def _extend(owner: type, name: str, extension: Callable[..., Any]) -> None:
    """Have `extension` run in the place of a method; it takes the method first, and then that method's arguments."""
    original = vars(owner).get(name)
    if original is None:
        raise ImportError(
            f"this version of {owner.__module__.partition('.')[0]} has no {owner.__name__}.{name}, which loads "
            "the gates of hf_lgelu. Known to work: transformers 5.17 to 5.24, diffusers 0.42"
        )
    function = getattr(original, "__func__", original)  # of a class method
    if hasattr(function, _EXTENDED):
        return

    @functools.wraps(function)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(function, *args, **kwargs)

    setattr(extended, _EXTENDED, True)
    setattr(owner, name, extended if function is original else classmethod(extended))


_under_construction: ContextVar[list[PreTrainedModel] | None] = ContextVar("models under construction", default=None)
"""Models with gates in a record that `from_pretrained` is building, the whole before its parts; None outside."""


def _note_construction(original: Any, model: PreTrainedModel, /, config: Any, *args: Any, **kwargs: Any) -> None:
    noted = _under_construction.get()
    if noted is not None and isinstance(config, PreTrainedConfig) and has_record(config):
        write_changes(config, without_guard(config))
        noted.append(model)
    original(model, config, *args, **kwargs)


def _rebuild_from_config(original: Any, cls: Any, /, config: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(config, Mapping) or not has_record(config):
        return original(cls, config, *args, **kwargs)
    plain = apply_changes(config, without_guard(config))
    record, _ = plain.pop(RECORD_KEY), plain.pop(GUARDS_KEY, None)
    given = original(cls, plain, *args, **kwargs)
    model = given[0] if isinstance(given, tuple) else given
    model.register_to_config(**config)
    rebuild_gates(model, record)
    return given


@contextmanager
def _gates_rebuilt() -> Iterator[None]:
    """A block that ends by giving each model built inside the gates of its record, while it has no memory yet."""
    noted: list[PreTrainedModel] = []
    token = _under_construction.set(noted)
    try:
        yield
    finally:
        _under_construction.reset(token)
    parts = {id(part) for model in noted for part in model.modules() if part is not model}
    for whole in (model for model in noted if id(model) not in parts):
        for model, record in list(recorded_models(whole)):
            rebuild_gates(model, record)
        held = {id(part.config): part.config for part in whole.modules() if isinstance(part, PreTrainedModel)}
        for config in held.values():  # some models give their parts copies
            write_changes(config, without_guard(config, back=True))


def _initialize_lambda_gelu(
    original: Any, model: PreTrainedModel, /, module: nn.Module, *args: Any, **kwargs: Any
) -> None:
    # Here torch.nn.init is guarded: reset_parameters leaves every tensor that was loaded as it is.
    if isinstance(module, LambdaGate) and not getattr(module, "_is_hf_initialized", False):
        module.reset_parameters()
    original(model, module, *args, **kwargs)


def _keep_records_true(
    original: Any,
    model: PreTrainedModel,
    /,
    save_directory: Any,
    is_main_process: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    renew_records(model)
    require_own_record(model)
    require_whole_config(model)
    original(model, save_directory, is_main_process, *args, **kwargs)
    if is_main_process:
        guard_code(model, save_directory)


def _tell_gates_of_code(original: Any, model: Any, /, *args: Any, **kwargs: Any) -> Any:
    name = type(model).__name__
    if hasattr(model, EXCHANGED):
        logger.warning(
            f"{name}.save_pretrained saves weights, and not the gates that hf_lgelu has exchanged: "
            f"{name}.from_pretrained builds those of the code, another network, without an error. Write the new gates "
            "into the code before you load the folder, or pickle the model"
        )
    return original(model, *args, **kwargs)


def _keep_gates_untied(original: Any, model: PreTrainedModel, /, *args: Any, **kwargs: Any) -> dict[str, str]:
    # Families that tie whole blocks by a pattern (Zamba) take a gate's buffers for weights, and then find none.
    of_gates = {f"{name}.{key}" for name, module in model.named_modules(remove_duplicate=False)
                if isinstance(module, LambdaGate) for key in _STATE}  # fmt: skip
    tied = original(model, *args, **kwargs)
    return {target: source for target, source in tied.items() if target not in of_gates}


def _report_lambda_gelu_keys(original: Any, model: PreTrainedModel, loading_info: Any) -> None:
    original(model, loading_info)
    if is_guarded(model):
        loading_info.mismatched_keys = set()  # or transformers would raise for these, and not say what to do
        raise RuntimeError(
            f"the config of this {type(model).__name__} cannot tell its gates: it is a part of a network, whose own "
            "config has the record. Load the whole network, and take the part from there"
        )
    modules = lambda_gelu_modules(model)
    for name, module in modules:
        problem = state_problem(module.raw_hardness, module.temperature, module.hardness_override)
        if problem is not None:
            raise RuntimeError(f"the checkpoint has no valid hardness for {name or 'the model'}: {problem}")
    owned, missing = {f"{name}.{key}" for name, _ in modules for key in _STATE}, set(loading_info.missing_keys)
    if owned and owned <= missing and _is_of_another_activation(model, missing, owned):
        loading_info.missing_keys = missing - owned  # they are no fault, so they are not listed
        logger.info(f"{len(modules)} λ-GELU hardnesses are new and start at λ = {modules[0][1].init_hardness}")
        _tell_other_functions(model)
    elif owned - missing and not has_record(model.config):  # gates in a record are always the checkpoint's own
        # The file may say more gates than the model has, which can be a part of the saved one.
        written, here = written_gates(model), gate_names(model.config.to_json_string())
        if written and not here <= written:
            logger.warning(
                f"The gates of the checkpoint are {', '.join(sorted(written))} and those of this model "
                f"{', '.join(sorted(here))}: with the same λ they are another function. To keep the network, leave "
                "the activation as the checkpoint's config says it"
            )
    lost = [key for key in loading_info.unexpected_keys if key.endswith(".raw_hardness")]
    if lost and not owned:
        logger.warning(
            f"The checkpoint holds the hardness of {len(lost)} λ-GELU activations and this model has none: its "
            "activations are another function. That is harmless only for a hardened checkpoint read as ReLU. To "
            "keep λ-GELU, set the config's activation key to 'lambda_gelu'"
        )


def _is_of_another_activation(model: PreTrainedModel, missing: set[str], owned: set[str]) -> bool:
    """Whether a checkpoint without any hardness is one that was trained with a plain activation.

    It is not where nothing of it fits the model, nor where its own config says that it has λ-GELU: then ReLU was in its
    place while it was saved, or its weights are of another run. A record of gates says so, for nobody writes one by
    hand; names of gates count in the config's file only. Where that file is not found, nobody knows.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    others = set(model.state_dict()) - owned - tied
    if others and others <= missing:
        return False
    recorded = any("activation" not in entry for _, record in recorded_models(model) for entry in record)
    written = written_gates(model)
    if not recorded and written == set():
        return True
    known = ("says that it has λ-GELU", "Was it saved while ReLU was substituted?")
    unknown = ("is not found again (subfolder, cache_dir)", "That is right only after training with a plain activation")
    said, advice = known if recorded or written else unknown
    logger.warning(
        f"The checkpoint's config {said}, and it holds no hardness: every λ starts at "
        f"{lambda_gelu_modules(model)[0][1].init_hardness}, whatever it was. {advice}"
    )
    return False


def _tell_other_functions(model: PreTrainedModel) -> None:
    """Warn where a gate at λ = 1 is another function than the activation that the checkpoint was trained with."""
    written = dict(config_entries(json.loads(written_config(model) or "{}")))
    for path, said in activation_strings(model.config):
        plain, name = str(written.get(path)).removeprefix("gated-"), said.removeprefix("gated-")
        if name in GATES and plain in ACT2FN and plain not in GATES:
            x = torch.linspace(-8, 8, 1001)
            with torch.no_grad():
                change = (ACT2FN[plain](x) - GATES[name].plain_function(x)).abs().max().item()
            if change > _SAME_FUNCTION:
                logger.warning(
                    f"The checkpoint was trained with {plain!r} ({'.'.join(path)}), and {name!r} at λ = 1 differs from "
                    f"that by up to {change:.2g}. To begin with the same network, load the checkpoint as it was; then "
                    "hf_lgelu.replace_activations(model) puts in the gates whose λ = 1 it is (for quick_gelu with "
                    "gate='lambda_silu', init_hardness=1.702), and convert_to_relu(model, data) makes ReLU of any"
                )


def written_gates(model: PreTrainedModel) -> set[str] | None:
    """The names of λ-gates in the config file of a model's checkpoint; None where the file is not found again."""
    text = written_config(model)
    return None if text is None else gate_names(text)


def written_config(model: PreTrainedModel) -> str | None:
    """The text of the config file of a model's checkpoint; "" without a checkpoint, None if it is not found."""
    source = getattr(model.config, "name_or_path", None) or "None"  # transformers writes str(None) for weights by hand
    if source == "None":
        return ""
    file: Any = os.path.join(source, CONFIG_NAME)
    if not os.path.exists(source):
        file = try_to_load_from_cache(source, CONFIG_NAME, revision=getattr(model.config, "_commit_hash", None))
    if not isinstance(file, str) or not os.path.isfile(file):
        return None
    with open(file, encoding="utf-8") as text:
        return text.read()
