"""The record of gates in a config, for gates that no activation name says, and the gates rebuilt from a record.

One activation name cannot say λ-gates at some sites only, gates of two kinds, or gates that a conversion kept. Nor can
it say gates in the place of calls: no network that a config builds has a module `called.K`. Surgery writes the site of
every λ-gate into the config, under "lambda_gelu". A conversion writes the sites of the gates that stayed.

A load by another function than `hf_lgelu.from_pretrained` would give a network of plain activations. So the keys that
decide about these activations get a guard: a value that names this function, and is no activation. The config keeps
the values without the guard next to the record.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from huggingface_hub import ModelHubMixin
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2CLS, ACT2FN

from hf_lgelu.activation.gates import DEFAULT_GATE, check_gate
from hf_lgelu.activation.module import GATE_MODULES, NEEDS_THE_PACKAGE, LambdaGate
from hf_lgelu.models.config_keys import (
    GUARDS_KEY,
    ConfigChange,
    UnsupportedConfigError,
    apply_changes,
    built_as_one,
    built_otherwise,
    changes_at,
    combined,
    kept_in,
    modules_of,
    plan_config_changes,
    value_at,
    without_guard,
)
from hf_lgelu.networks.elementwise import form_of_activation
from hf_lgelu.networks.rewrite import GATES_OF_CALLS, Call, calls_of, chain_of, put_gates
from hf_lgelu.networks.sites import find_sites, is_activation, place, uncompiled_name

RECORD_KEY = "lambda_gelu"
"""The key of the record, in a config that alone cannot rebuild its network."""

VARIANT = "needs_hf_lgelu"
"""The variant, a part of the file's name, of weights whose config has a record and no key for a guard."""

_FIELDS = ("site", "gate", "activation", "call")
_ONE_HARDNESS = ("raw_shape", [1])  # the shape of λ, which 0.2.0 wrote too

SiteRecord = list[dict[str, Any]]
"""One entry per λ-gate's site in registration order: {"site"}, and {"gate"} for another gate than λ-GELU.

After these come {"site", "activation"} of plain gates that the config alone would not build. {"call"} is the call whose
place a gate takes."""


def plan_gates(model: PreTrainedModel, planned: Mapping[str, nn.Module]) -> list[ConfigChange]:
    """The config changes after which a load gives the gates `planned` for these sites, and all others as now.

    If the config's keys can say all gates, an old record is removed. Else the config gets a record, and the keys that
    decide about activations a guard. Raises UnsupportedConfigError for a gate without a name in transformers.
    """
    unguarded = apply_changes(model.config, without_guard(model.config))
    record = describe_sites(model, planned, built_otherwise(model, unguarded, planned) | dict(planned))
    keys = _keys_that_say(model, planned, record)
    if keys is not None:
        return keys + forget_sites(model.config)
    return _remembered(model, record, _guards(model, unguarded, {entry["site"] for entry in record}))


def _keys_that_say(
    model: PreTrainedModel, planned: Mapping[str, nn.Module], record: SiteRecord
) -> list[ConfigChange] | None:
    """The changes of keys that give all gates of a record; None if no key does, or if gates would share λ."""
    names, places = {_said(entry) for entry in record}, {entry["site"] for entry in record}
    if len(names) != 1:
        return None
    try:
        keys = plan_config_changes(model, places, names.pop())
    except UnsupportedConfigError:
        return None
    there = {name: module for name, module in (modules_of(model) | dict(planned)).items() if name in places}
    has_hardness = any(isinstance(module, LambdaGate) for module in there.values())
    is_shared = has_hardness and built_as_one(model, apply_changes(model.config, keys), there)
    return None if is_shared else keys


def _guards(model: PreTrainedModel, unguarded: PreTrainedConfig, places: set[str]) -> list[ConfigChange]:
    """The changes that guard the keys of these places, or if there are none, the keys of any gate."""
    every = {uncompiled_name(site.name) for site in find_sites(model)}
    # A family with its own table knows ReLU, but not the names of λ-gates.
    for sites, known in itertools.product((places, every), (DEFAULT_GATE, "relu")):
        changes = [each for each in changes_at(model, unguarded, sites, known) if not isinstance(each.old, bool)]
        if changes:
            return [replace(change, new=NEEDS_THE_PACKAGE) for change in changes]
    return []


def _remembered(model: PreTrainedModel, record: SiteRecord, guards: list[ConfigChange]) -> list[ConfigChange]:
    """The changes that put a record into the config, guard its keys, and remove the records of inner configs."""
    config = model.config
    kept = {".".join(change.path): [change.old, change.new] for change in guards} or None
    inner = [change for change in forget_sites(config) if len(change.path) > 1]
    own = [
        ConfigChange((key,), value_at(config, (key,)), new) for key, new in ((RECORD_KEY, record), (GUARDS_KEY, kept))
    ]
    own = [change for change in own if change.old is not None or change.new is not None]
    return [*combined(config, without_guard(config), guards), *inner, *own]


def loads_elsewhere(config: PreTrainedConfig) -> bool:
    """Whether the config has a record and no guard: a plain load gives another network without an error."""
    return has_record(config) and next(kept_in(config, GUARDS_KEY), None) is None


def saved_without_gates(model: nn.Module) -> Iterator[str]:
    """A warning for each class in a model, of diffusers or the Hub's mixin, whose `save_pretrained` saves no gates."""
    for kind in dict.fromkeys(map(type, model.modules())):
        if issubclass(kind, ModelHubMixin) or hasattr(kind, "register_to_config"):  # a method of diffusers' models
            yield (
                f"{kind.__name__}.save_pretrained saves weights, but no gates: {kind.__name__}.from_pretrained builds "
                "the gates of its code and config, which is another network, without an error. Load the state dict "
                "into a model with the new gates, or pickle the model"
            )


def describe_sites(
    model: nn.Module, planned: Mapping[str, nn.Module] | None = None, plain: Iterable[str] = ()
) -> SiteRecord:
    """The record of a model's λ-gates, and of the plain gates at the sites named in `plain`.

    A module `planned` for a site takes the place of the present one. Raises UnsupportedConfigError for a plain gate
    without a name in transformers.
    """
    record: SiteRecord = []
    for site in find_sites(model):
        name = uncompiled_name(site.name)
        module = (planned or {}).get(name, site.module)
        if not isinstance(module, LambdaGate):
            continue
        gate = {} if module.row == DEFAULT_GATE else {"gate": module.row}
        record.append({"site": name, **gate})
    calls = {uncompiled_name(name): said for name, said in recorded_calls(model).items()}
    for name in dict.fromkeys([*plain, *calls]):
        parent, attribute = _site_place(model, name)
        module = (planned or {}).get(name) or getattr(parent, attribute, None)
        if module is not None and not isinstance(module, LambdaGate):
            call = {"call": calls[name]} if name in calls else {}
            record.append({"site": name, "activation": _name_of(module), **call})
    return record


def _said(entry: Mapping[str, Any]) -> str:
    """The activation name of an entry's gate."""
    return entry["activation"] if "activation" in entry else entry.get("gate", DEFAULT_GATE)


def _name_of(module: nn.Module) -> str:
    """The name of a plain activation in transformers. Raises UnsupportedConfigError where it has none."""
    x = torch.linspace(-8, 8, 129)
    # Several classes compute the same function, but only the module's own class gives the same bits.
    own = [name for name in ACT2CLS if name not in GATE_MODULES and ACT2CLS[name] is type(module)]
    form = form_of_activation(module)
    for name in (*own, *([form.name] if form is not None and form.name in ACT2FN else [])):
        if torch.allclose(ACT2FN[name](x), module(x.clone()), rtol=0, atol=1e-6):
            return name
    raise UnsupportedConfigError(
        f"transformers has no name for the activation {type(module).__name__} as it is here, so no config can say it: "
        "exchange this gate, too"
    )


def _names(model: nn.Module, name: str) -> tuple[str, ...]:
    """The names that a recorded site may have in `model`: with and without the prefix of the model below the head."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return name, prefix + name, name.removeprefix(prefix)


def _site_place(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """(parent, attribute) of a site, or (None, attribute)."""
    for candidate in _names(model, name):
        parent_name, _, attribute = candidate.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
        except AttributeError:
            continue
        if callable(getattr(parent, attribute, None)):
            return parent, attribute
    return None, attribute


def forget_sites(config: PreTrainedConfig) -> list[ConfigChange]:
    """The config changes that remove every record and the values kept for guarded keys."""
    return [
        ConfigChange((*path, key), value, None)
        for key in (RECORD_KEY, GUARDS_KEY)
        for path, value in kept_in(config, key)
    ]


def has_record(config: PreTrainedConfig) -> bool:
    """Whether a config, or a config inside it, holds a record."""
    return next(kept_in(config, RECORD_KEY), None) is not None


def recorded_models(
    model: nn.Module, enclosing: SiteRecord | None = None
) -> Iterator[tuple[PreTrainedModel, SiteRecord]]:
    """(model, record) of every PreTrainedModel in a tree whose config holds its own record.

    A record that equals the enclosing model's belongs to that model, because inner models share or copy the config.
    """
    if isinstance(model, PreTrainedModel):
        record = value_at(model.config, (RECORD_KEY,))
        if record and record != enclosing:
            yield model, record
        enclosing = record
    for child in model.children():
        yield from recorded_models(child, enclosing)


def rebuild_gates(model: PreTrainedModel, record: SiteRecord) -> None:
    """Put the gates of a record into a model that was built from the config without the guard, in place.

    Raises ValueError for a damaged record, and for a record whose gates have no place in the model.
    """
    entries = record if isinstance(record, list) else [None]  # anybody can write a config
    if not all(isinstance(each, Mapping) and isinstance(each.get("site"), str) for each in entries):
        raise ValueError(f"the config's {RECORD_KEY!r} is no record of λ-GELU sites: {str(record)[:80]}")
    calls = {entry["site"]: entry["call"] for entry in record if "call" in entry}
    restore_calls(model, calls)
    absent = []
    for entry in record:
        name = entry["site"]
        parent, attribute = _site_place(model, name)
        if parent is None:
            absent.append(name)
            continue
        unknown = [key for key in entry if key not in _FIELDS and (key, entry[key]) != _ONE_HARDNESS]
        if unknown:
            raise ValueError(
                f"the config's record says {', '.join(sorted(unknown))} of the gate at {name}, and this version knows "
                "no gate that has it. Load the folder in the version of hf_lgelu that saved it, and export ReLU there"
            )
        plain = entry.get("activation")
        is_known = plain is None or (isinstance(plain, str) and plain in ACT2FN)
        if not is_known or not is_activation(getattr(parent, attribute)):
            raise ValueError(
                f"the config's record puts {plain or 'a gate'} at {name} of {type(model).__name__}, which is no "
                "activation here: the checkpoint is damaged, or of another model class"
            )
        gate = check_gate(entry.get("gate", DEFAULT_GATE)).name
        place(parent, attribute, GATE_MODULES[gate]() if plain is None else ACT2FN[plain])
    # Another class may have another head, or none.
    is_same = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
    if len(absent) == len(record) or (absent and is_same):
        raise ValueError(
            f"the checkpoint has gates at {', '.join(absent)}, and {type(model).__name__} has no module at "
            f"{'these places' if len(absent) > 1 else 'this place'}; load the model class that was saved, and change "
            "layers before surgery or conversion"
        )
    new = describe_sites(model, plain=[entry["site"] for entry in record if "activation" in entry])
    for part in model.modules():  # in some models each part has a copy of the config
        if isinstance(part, PreTrainedModel) and getattr(part.config, RECORD_KEY, None) == record:
            setattr(part.config, RECORD_KEY, new)


def recorded_calls(model: nn.Module) -> dict[str, dict[str, Any]]:
    """{name of a gate in the place of a call: the call in plain values}; `restore_calls` reads these."""
    return {
        f"{name}.{GATES_OF_CALLS}.{number}".removeprefix("."): call._asdict()
        for name, module in model.named_modules()
        for number, call in enumerate(calls_of(module))
    }


def restore_calls(model: nn.Module, recorded: Mapping[str, Mapping[str, Any]]) -> None:
    """Put ReLU in the place of the calls in `recorded`, which `recorded_calls` gave. In place.

    `rebuild_gates` then replaces each ReLU by its gate. A recorded module that the model lacks is skipped. Raises
    ValueError for a call that the code does not have.
    """
    found: dict[nn.Module, dict[int, Call]] = defaultdict(dict)
    for name, said in recorded.items():
        _, _, place = name.rpartition(f"{GATES_OF_CALLS}.")
        try:
            number, call = int(place), Call(**said)
            call = call._replace(numbers=tuple(call.numbers))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the config's record has no readable call at {name}: {str(said)[:80]}") from error
        modules = dict(model.named_modules(remove_duplicate=False))
        names = [each.rpartition(f"{GATES_OF_CALLS}.")[0].removesuffix(".") for each in _names(model, name)]
        owners = [modules[each] for each in dict.fromkeys(names) if each in modules]
        if owners:  # else the call was in a head that this model lacks
            owner = next((each for each in owners if chain_of(type(each), call)), owners[0])
            found[owner][number] = call
    for owner, calls in found.items():
        put_gates(owner, [calls[place] for place in sorted(calls)], [nn.ReLU() for _ in calls])
