"""The keys of a config that decide a model's activations and widths: found by building the model, and rewritten.

The key has a dozen names over the families of transformers (hidden_act, activation_function, feed_forward_proj,
ff_activation, a boolean gelu_activation, timm's model_args["act_layer"], a key in each sub-config ...). A wrong key
raises no error. So this module has no list of families. It tries each key that holds an activation's name, or a width:
it builds the model without memory, from a config that went through save and load, and looks at the modules there.

Some modules also keep the name, and look up the activation when they run. A key that changes this name is not taken,
because the saved network would run another activation there than the network in memory.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, TypeAlias, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from hf_lgelu.networks.rewrite import own_class
from hf_lgelu.networks.run import NOT_TAKEN
from hf_lgelu.networks.sites import SMOOTH_KINDS, computes_same, find_sites, is_activation, kind_of, uncompiled_name
from hf_lgelu.registry import TIMM, TIMM_TABLE

Content = TypeVar("Content")

GUARDS_KEY = "lambda_gelu_guards"
"""{key with its steps joined by dots: [value for the plain network, guard]}."""

_GATED = "gated-"  # T5 spells a gated unit's activation "gated-<name>"


@dataclass(frozen=True)
class ConfigChange:
    """A key of a config with its value before and after. `path` has a step for each sub-config or dict.

    A new value of None removes the key.
    """

    path: tuple[str, ...]
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = (text if len(text) <= 80 else f"{text[:77]}..." for text in map(repr, (self.old, self.new)))
        return f"{'.'.join(self.path)}: {old} → {new}"


class UnsupportedConfigError(RuntimeError):
    """No key of the config puts the wanted activation at exactly the wanted sites.

    >>> from hf_lgelu.models.config_keys import UnsupportedConfigError, plan_config_changes
    >>> from transformers import MptConfig, MptForCausalLM
    >>> model = MptForCausalLM(MptConfig(d_model=8, n_heads=2, n_layers=1, vocab_size=9, max_seq_len=4))
    >>> try:  # MPT's config has no key for its activation
    ...     plan_config_changes(model, {"transformer.blocks.0.ffn.act"}, "relu")
    ... except UnsupportedConfigError as error:
    ...     print(str(error).partition(" and ")[0])
    no activation key of MptConfig puts 'relu' at transformer.blocks.0.ffn.act
    """


def pretrained_roots(model: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """(name, module) of the outermost models of transformers in a module tree."""
    if isinstance(model, PreTrainedModel):
        return [("", model)]
    found = []
    for name, child in model.named_children():
        found += [(f"{name}.{inner}" if inner else name, root) for inner, root in pretrained_roots(child)]
    return found


def plan_config_changes(model: PreTrainedModel, site_names: set[str], activation: str) -> list[ConfigChange]:
    """The changes after which the config alone builds `activation` at these sites, and all others as they are.

    `activation` is "relu", a row of GATES, or one of a row's `plain_names`; "gelu" is the erf form. Guards are removed.
    Raises UnsupportedConfigError if no set of keys does this.
    """
    lifted = without_guard(model.config)
    config = apply_changes(model.config, lifted)
    there = modules_of(model)
    others = {name: site.module for site in find_sites(model) if (name := uncompiled_name(site.name)) not in site_names}
    plain = {
        name: module
        for name, module in there.items()
        if is_activation(module) and name not in site_names | others.keys()
    }
    looked_up = _looked_up_names(there)
    renamed: set[str] = set()
    refusals: list[Exception] = []
    unchanged: dict[str, nn.Module] = {}

    def reached(changes: list[ConfigChange]) -> set[str]:
        """The wanted sites that these changes reach; none if they change another site."""
        skeleton = _built(model, config, changes, refusals)
        if not changes:
            unchanged.update(skeleton)
        if not all(computes_same(_at(skeleton, name), gate) for name, gate in others.items()):
            return set()
        # Other activations (ReLU of an earlier exchange) may differ from the config; the changes must not change them.
        for name, module in plain.items():
            if not any(computes_same(_at(skeleton, name), there) for there in (module, _at(unchanged, name))):
                return set()
        found = _reached(skeleton, site_names, activation)
        built = _looked_up_names(skeleton) if found else {}
        other_names = {name for name, value in looked_up.items() if built.get(name, value) != value}
        renamed.update(other_names)
        return set() if other_names else found

    candidates = _candidates(config, activation)
    at_no_key = reached([])  # sites with this activation without a change
    chosen = [change for change in candidates if reached([change]) - at_no_key]
    chosen += _coupled(model, config, site_names, activation, chosen)
    missed = site_names - reached(chosen)
    if missed:
        raise UnsupportedConfigError(
            f"no activation key of {type(model.config).__name__} puts {activation!r} at {', '.join(sorted(missed))} "
            "and leaves the other activations as they are"
            + (f": {', '.join(sorted(renamed)[:4])} would look up another activation" if renamed else "")
        ) from (refusals[-1] if refusals else None)
    return combined(model.config, lifted, chosen)


def built_as_one(model: PreTrainedModel, config: PreTrainedConfig, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the config builds one module for several of these places, which hold different modules here."""
    skeleton, places = _built(model, config), dict[int, set[int]]()
    for name, module in modules.items():
        places.setdefault(id(_at(skeleton, name)), set()).add(id(module))
    return any(len(held) > 1 for held in places.values())


def built_otherwise(
    model: PreTrainedModel, config: PreTrainedConfig, planned: Mapping[str, nn.Module] | None = None
) -> dict[str, nn.Module]:
    """{name: activation or λ-gate} of the modules, present or `planned`, that this config alone would not build."""
    planned, skeleton = planned or {}, _built(model, config)
    if not skeleton:
        return dict(planned)
    return {
        name: module
        for name, module in {**modules_of(model), **planned}.items()
        if (name in planned or is_activation(module))
        and name.rpartition(".")[0] in skeleton
        and not computes_same(_at(skeleton, name), module)
    }


def held_configs(
    config: PreTrainedConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], PreTrainedConfig]]:
    """(path, config) of a config and of each config inside it."""
    yield path, config
    for name, held in _items(config):
        if isinstance(held, PreTrainedConfig):
            yield from held_configs(held, (*path, name))


def without_guard(config: PreTrainedConfig, *, back: bool = False) -> list[ConfigChange]:
    """The config changes that give each guarded key the plain network's value, or with `back` the guard."""
    kept = [
        ((*path, *key.split(".")), *values[:: 1 if back else -1])
        for path, guards in kept_in(config, GUARDS_KEY)
        for key, values in guards.items()
    ]
    return [ConfigChange(path, old, new) for path, old, new in kept if value_at(config, path) == old]


def value_at(config: Any, path: tuple[str, ...]) -> Any:
    """The value of a key, or None where there is none."""
    for step in path:
        config = config.get(step) if isinstance(config, Mapping) else getattr(config, step, None)
    return config


def kept_in(config: PreTrainedConfig, key: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value of `key`) of each config and sub-config that has a value."""
    for path, held in held_configs(config):
        value = value_at(held, (key,))
        if value is not None:
            yield path, value


def changes_at(
    model: PreTrainedModel, config: PreTrainedConfig, sites: set[str], activation: str
) -> list[ConfigChange]:
    """The changes of `config` that each build `activation` at one or more of the sites."""
    chosen = [
        change
        for change in _candidates(config, activation)
        if _reached(_built(model, config, [change]), sites, activation)
    ]
    return chosen + _coupled(model, config, sites, activation, chosen)


def combined(config: PreTrainedConfig, *steps: list[ConfigChange]) -> list[ConfigChange]:
    """One change for each key whose value after all `steps` of changes differs from its value in `config`."""
    last = {change.path: change.new for changes in steps for change in changes}
    present = dict(config_entries(config))
    return [ConfigChange(path, present.get(path), new) for path, new in last.items() if present.get(path) != new]


def apply_changes(config: PreTrainedConfig, changes: Sequence[ConfigChange]) -> PreTrainedConfig:
    """A copy of `config` with the changes made, as after save and load."""
    changed = copy.deepcopy(config)
    write_changes(changed, changes)
    return type(changed).from_dict(changed.to_dict())


ConfigPlans: TypeAlias = list[tuple[PreTrainedModel, list[ConfigChange]]]
"""The planned changes of the configs in one model, by the models that own these configs."""


def plan_configs(
    model: nn.Module,
    at_sites: Mapping[str, Content],
    plan: Callable[[PreTrainedModel, dict[str, Content]], list[ConfigChange]],
) -> ConfigPlans:
    """The changes that `plan` gives for each model that owns a config and has a site.

    `plan` takes the model and {name of a site in this model: content of `at_sites`}.
    """
    plans: ConfigPlans = []
    for name, root in pretrained_roots(model):
        prefix = f"{name}." if name else ""
        inside = {
            uncompiled_name(site.removeprefix(prefix)): content
            for site, content in at_sites.items()
            if site.startswith(prefix)
        }
        if inside:
            plans.append((root, plan(root, inside)))
    return plans


def write_configs(plans: ConfigPlans) -> tuple[ConfigChange, ...]:
    """The planned changes, after they are made in the configs."""
    for root, changes in plans:
        write_config_changes(root, changes)
    return tuple(change for _, changes in plans for change in changes)


def write_config_changes(model: PreTrainedModel, changes: list[ConfigChange]) -> None:
    """Make the changes in a copy of the model's config, because another model may share the config."""
    if not changes:
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    holders = [module for module in model.modules() if isinstance(vars(module).get("config"), PreTrainedConfig)]
    for held in [module.config for module in holders if type(module.config) is type(model.config)]:
        if id(held) not in copies:  # T5's encoder has a copy of the whole model's config
            said = dict(config_entries(held))
            copies[id(held)] = copy.deepcopy(held)
            own = [change for change in changes if change.old is not None and said.get(change.path) == change.old]
            write_changes(copies[id(held)], own)
    for module in holders:
        module.config = copies.get(id(module.config), module.config)
    write_changes(model.config, changes)


def forget_checkpoint(model: nn.Module) -> None:
    """Clear the checkpoint's name in a changed model, so that no adapter names that checkpoint as its base."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.name_or_path = module.config._name_or_path = ""


def write_changes(config: PreTrainedConfig, changes: Sequence[ConfigChange]) -> None:
    """Make the changes in this config object."""
    for change in changes:
        holder: Any = config
        for step in change.path[:-1]:
            holder = holder[step] if isinstance(holder, Mapping) else getattr(holder, step)
        if isinstance(holder, MutableMapping):
            holder[change.path[-1]] = change.new
        elif change.new is None:
            delattr(holder, change.path[-1])
        else:
            setattr(holder, change.path[-1], change.new)


def _built(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    changes: Sequence[ConfigChange] = (),
    refused: list[Exception] | None = None,
) -> dict[str, nn.Module]:
    """{name: module} of the model that the changed config builds, without memory; the model itself is at "".

    Empty if the config or the model raises an error, which is added to `refused`.
    """
    try:
        with torch.device("meta"):
            built = own_class(model)(apply_changes(config, changes))
    except (*NOT_TAKEN, StrictDataclassError, ZeroDivisionError) as refusal:
        if refused is not None:
            refused.append(refusal)
        return {}
    return dict(built.named_modules(remove_duplicate=False))


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """{name as in a checkpoint: module}; a module at several places has several names."""
    return {uncompiled_name(name): module for name, module in model.named_modules(remove_duplicate=False)}


def _at(modules: Mapping[str, nn.Module], name: str) -> Any:
    """The module or function at a site; None if the model has no such site."""
    parent_name, _, attribute = name.rpartition(".")
    return getattr(modules.get(parent_name), attribute, None)


def _reached(skeleton: Mapping[str, nn.Module], sites: Iterable[str], activation: str) -> set[str]:
    """The sites where a built model has the activation."""
    return {name for name in sites if computes_same(_at(skeleton, name), ACT2FN[activation])}


def _looked_up_names(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """{attribute: name of an activation}, of modules that look up the activation when they run."""
    names = _activation_names()
    return {
        f"{name}.{attribute}" if name else attribute: value
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if isinstance(value, str) and value.lower() in names and _is_read_in_a_call(type(module), attribute)
    }


def _is_read_in_a_call(module_class: type, attribute: str) -> bool:
    """Whether a method other than __init__ reads an attribute of this name."""

    def names_in(code: CodeType) -> set[str]:
        inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
        return set(code.co_names).union(*inner)

    bases = [vars(base) for base in module_class.__mro__ if base not in (nn.Module, object)]
    held = [getattr(value, "fget", value) for base in bases for name, value in base.items() if name != "__init__"]
    functions = (inspect.unwrap(value) for value in held if inspect.isfunction(value))
    return any(attribute in names_in(function.__code__) for function in functions if inspect.isfunction(function))


def _activation_names() -> set[str]:
    return {*ACT2FN, *getattr(sys.modules.get(TIMM), TIMM_TABLE, ())}  # without timm no model has a layer of it


def _candidates(config: PreTrainedConfig, activation: str) -> list[ConfigChange]:
    changes = []
    for path, value in activation_strings(config):
        new = _GATED + activation if value.startswith(_GATED) else activation
        # In T5, "gated-gelu" is the tanh form.
        changes.append(ConfigChange(path, value, "gated-gelu_python" if new == "gated-gelu" else new))
    if activation in ("relu", "gelu"):  # XLM, Flaubert: GELU if true, else ReLU
        changes += [
            ConfigChange(path, value, activation == "gelu")
            for path, value in config_entries(config)
            if path[-1] == "gelu_activation"
        ]
    for path, held in held_configs(config):
        if hasattr(held, "model_args") and hasattr(
            held, "architecture"
        ):  # TimmWrapperConfig, or the config of a tower of timm
            if held.model_args is None:
                changes.append(ConfigChange((*path, "model_args"), None, {"act_layer": activation}))
            elif "act_layer" not in held.model_args:
                changes.append(ConfigChange((*path, "model_args", "act_layer"), None, activation))
    return changes


def _coupled(
    model: PreTrainedModel, config: PreTrainedConfig, sites: set[str], activation: str, chosen: list[ConfigChange]
) -> list[ConfigChange]:
    """The changes of further keys, by which other readers of the config build the same gates.

    These keys are of two kinds. Some decide without the chosen keys: T5 reads feed_forward_proj if there is no
    dense_act_fn. Others name a smooth gate, and the config's class does not know them: other versions and programs read
    Gemma's hidden_activation instead of hidden_act.
    """
    without = [replace(change, new=None) for change in chosen]
    holders = {path: held for path, held in held_configs(config) if any(change.path[:-1] == path for change in chosen)}
    found = []
    for change in _candidates(config, activation):
        holder = holders.get(change.path[:-1])
        if holder is None or change.path in {other.path for other in chosen}:
            continue
        said, known = str(change.old).removeprefix(_GATED).lower(), inspect.signature(type(holder)).parameters
        if change.path[-1] not in known and said in ACT2FN and kind_of(ACT2FN[said]) in SMOOTH_KINDS:
            found.append(change)
        else:
            alone, none = (_built(model, config, changes) for changes in ([*without, change], without))
            found += [change] * bool(_reached(alone, sites, activation) - _reached(none, sites, activation))
    return found


def _items(node: Any) -> Iterable[tuple[Any, Any]]:
    return (node if isinstance(node, Mapping) else vars(node)).items()


def config_entries(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every key of a config and of the sub-configs and dicts inside, without private keys."""
    for key, value in _items(node):
        if not isinstance(key, str) or key.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig | Mapping):
            yield from config_entries(value, (*path, key))
        else:
            yield (*path, key), value


def activation_strings(config: PreTrainedConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, name) of the activations in a config; the name of a gated unit begins with "gated-"."""
    names = _activation_names()
    for path, value in config_entries(config):
        if isinstance(value, str) and value.removeprefix(_GATED).lower() in names:
            yield path, value


# In the names of keys that may be None: in GPT-2, this is four times the hidden size.
_LEFT_OPEN = ("inner", "intermediate")


def plan_width_changes(
    model: PreTrainedModel, resized: Callable[[Any], Any], beside: Sequence[Sequence[ConfigChange]]
) -> list[ConfigChange] | None:
    """The changes after which the config alone builds the tensors that `model` has now; None if no key does this.

    The key has many names (n_inner, ffn_dim, d_ff, encoder_ffn_dim ...). Keys are added one by one, always the key that
    leaves the fewest tensors wrong. An encoder-decoder may have a key for either side, and another key may hold the
    same number by chance. If this fails, all keys are tried at once.

    `resized` gives the new value for the value of a key: an integer, a list, or None if a family leaves the width open.
    A value that is no width stays. The changes `beside` may be needed too; each is tried with the keys.
    """
    unguarded = apply_changes(model.config, without_guard(model.config))

    def built_shapes(changes: Sequence[ConfigChange]) -> dict[str, tuple[int, ...]] | None:
        built = _built(model, unguarded, changes)
        return _shapes(built[""]) if built else None  # no model: a key that cannot hold this width

    # Other tensors of the config stay, such as the pooler that BertModel(..., add_pooling_layer=False) lacks.
    shapes = (built_shapes([]) or {}) | _shapes(model)
    entries = [
        (path, value)
        for path, value in config_entries(model.config)
        if type(value) in (int, list)  # False is no width of 0
        or (value is None and any(part in path[-1] for part in _LEFT_OPEN))
    ]
    keys = [ConfigChange(path, value, new) for path, value in entries if (new := resized(value)) != value]

    def wrong(changes: Sequence[ConfigChange]) -> float:
        found = built_shapes(changes)
        return float("inf") if found is None else len(found.items() ^ shapes.items())

    for changes in ([*start, *other] for other in beside for start in ([], keys)):
        left = wrong(changes)
        while left:
            tried = [(wrong([*changes, key]), key) for key in keys if key not in changes]
            fewest, key = min(tried, key=lambda pair: pair[0], default=(left, None))
            if key is None or not fewest < left:
                break
            changes, left = [*changes, key], fewest
        if not left:
            for change in changes:  # a key of another meaning, such as a token's number, may equal the width
                fewer = [other for other in changes if other is not change]
                changes = changes if wrong(fewer) else fewer
            return changes
    return None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


_PROGRAMS = {
    "bert": "llama.cpp",
    "falcon": "CTranslate2 and llama.cpp",
    "gpt2": "llama.cpp",
    "llama": "CTranslate2, llama.cpp, MLX and TGI",
    "mpt": "CTranslate2",
}
"""{model_type of transformers: programs that compute another network than its config says}; sources: docs/deploy.md."""


def runtime_warnings(model: nn.Module) -> tuple[str, ...]:
    """A sentence for each family in a model whose activation some programs ignore, with any head: llama.cpp ranks texts
    by a BERT classifier.

    >>> from transformers import GPT2Config, GPT2Model
    >>> from hf_lgelu.models.config_keys import runtime_warnings
    >>> runtime_warnings(GPT2Model(GPT2Config(n_layer=1, n_head=1, n_embd=8)))[0][:43]
    "in llama.cpp, a gpt2 has its family's own a"
    """
    roots = pretrained_roots(model)
    families = dict.fromkeys(held.model_type for _, root in roots for _, held in held_configs(root.config))
    return tuple(
        f"in {_PROGRAMS[family]}, a {family} has its family's own activation and biases whatever the config says: "
        "another network, without an error"
        for family in families
        if family in _PROGRAMS
    )
