"""What a config remembers of gates that an activation string cannot say: several λ per layer, only some sites, or
gates of two kinds.

Surgery then writes every λ-GELU site and the shape of its hardness into the config, under "lambda_gelu", and a
conversion the gates that stayed as they were.

A process that has not imported this package would read such a checkpoint as a network of plain activations. So the
keys that decide about these activations are guarded: they name this package, which no such process can look up, and
what they said is kept beside the record.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2CLS, ACT2FN
from transformers.utils import logging

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.module import GATE_MODULES, LambdaGate
from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    apply_changes,
    changes_at,
    combined,
)
from hf_lgelu.models.sites import find_sites, kind_of, uncompiled_name
from hf_lgelu.registry import NEEDS_THE_PACKAGE

logger = logging.get_logger(__name__)

RECORD_KEY = "lambda_gelu"
"""In a config that alone cannot rebuild its network."""

_GUARDED = "lambda_gelu_guards"
"""{key, its steps joined by dots: [what it says of the plain network, the guard]}."""

SiteRecord = list[dict[str, Any]]
"""One entry per site in registration order (JSON objects lose theirs): {"site", "raw_shape"}, and {"gate"} where that
is no λ-GELU. Behind them {"site", "activation"} of plain gates that the config alone would not build there."""

_FORMS = {"gelu": ("gelu", "gelu_pytorch_tanh", "quick_gelu"), "silu": ("silu",), "mish": ("mish",)}


def describe_sites(
    model: nn.Module, planned: Mapping[str, nn.Module] | None = None, plain: Iterable[str] = ()
) -> SiteRecord:
    """The record of a model's λ-GELU sites, and of the sites named in `plain` with what is there.

    A module `planned` for a site counts as being there. Raises UnsupportedConfigError where a plain one has no name.
    """
    record: SiteRecord = []
    for site in find_sites(model):
        name = uncompiled_name(site.name)
        module = (planned or {}).get(name, site.module)
        if not isinstance(module, LambdaGate):
            continue
        gate = {} if module.gate == DEFAULT_GATE else {"gate": module.gate}
        record.append({"site": name, "raw_shape": list(module.raw_hardness.shape), **gate})
    for name in plain:
        module = (planned or {}).get(name) or _at(model, name)
        if module is not None and not isinstance(module, LambdaGate):
            record.append({"site": name, **_plain_entry(module)})
    return record


def describes(record: SiteRecord, model: nn.Module) -> bool:
    """Whether a model has at its sites what the record says."""
    return describe_sites(model, plain=plain_sites(record)) == record


def renew_records(model: nn.Module) -> None:
    """Have each record in the configs say what is there now. Changes the configs; for a model about to be saved.

    Sites that were recorded may have gone or have other names, as behind a layer that was dropped. Raises RuntimeError
    where the gates that are there cannot be told so: a plain one is in the record, whose name another may have now.
    """
    for inner, record in list(recorded_models(model)):
        there = describe_sites(inner, plain=plain_sites(record))
        if _without_shapes(there) == _without_shapes(record):  # FSDP shows of each s the part of this process
            continue
        if plain_sites(record) or not any(isinstance(site.module, LambdaGate) for site in find_sites(inner)):
            raise RuntimeError(
                f"the gates of {type(inner).__name__} are no longer those that its config remembers "
                f"({', '.join(entry['site'] for entry in record[:4])}{' and so on' if len(record) > 4 else ''}): saved "
                "like this, it would be loaded as another network. Take layers away, or put others in, before surgery "
                "or conversion, not after it; substitute_relu exchanges gates and what the config remembers together"
            )
        actual = describe_sites(inner)
        for part in inner.modules():  # which may have copies of the config
            if isinstance(part, PreTrainedModel) and getattr(part.config, RECORD_KEY, None) == record:
                setattr(part.config, RECORD_KEY, actual)


def require_own_record(model: PreTrainedModel) -> None:
    """Refuse to save alone a part of a network of whose gates only the whole one's config tells.

    Raises RuntimeError.
    """
    if not has_record(model.config) and f'"{NEEDS_THE_PACKAGE}"' in model.config.to_json_string():
        raise RuntimeError(
            f"{type(model).__name__} is a part of a network whose config alone remembers its gates: saved by itself, "
            "it could not be loaded. Save the whole network; or substitute_relu(the whole), and save the part then; or "
            "put the gates into the part alone, before it becomes one"
        )


def _without_shapes(record: SiteRecord) -> SiteRecord:
    return [{key: value for key, value in entry.items() if key != "raw_shape"} for entry in record]


def has_record(config: PreTrainedConfig) -> bool:
    """Whether a config, or one inside it, holds a record."""
    return any(True for _ in _kept(config, RECORD_KEY, ()))


def recorded_plain_sites(config: PreTrainedConfig) -> list[str]:
    """Names of the plain gates that a config remembers."""
    return plain_sites(getattr(config, RECORD_KEY, None) or [])


def plain_sites(record: SiteRecord) -> list[str]:
    """Names of the plain gates in a record."""
    return [entry["site"] for entry in record if "activation" in entry]


def _at(model: nn.Module, name: str) -> nn.Module | None:
    parent, attribute = site_place(model, name)
    return None if parent is None else getattr(parent, attribute)


def _plain_entry(module: nn.Module) -> dict[str, Any]:
    """What a record says of a plain activation: its name in transformers, of a LeakyReLU its slope."""
    if isinstance(module, nn.LeakyReLU):
        return {"activation": "leaky_relu", "negative_slope": module.negative_slope}
    x = torch.linspace(-8, 8, 129)
    # Several classes compute the same function; the bits are those of its own one.
    own = [name for name in ACT2CLS if name not in GATE_MODULES and ACT2CLS[name] is type(module)]
    for name in (*own, *_FORMS.get(kind_of(module) or "", ())):
        if torch.allclose(ACT2FN[name](x), module(x.clone()), rtol=0, atol=1e-6):
            return {"activation": name}
    raise UnsupportedConfigError(f"{type(module).__name__} is no activation that transformers knows by name")


def remember_sites(
    model: PreTrainedModel, record: SiteRecord, plain: list[ConfigChange] | None = None
) -> list[ConfigChange]:
    """The config changes that leave this record, and no other one in a sub-config, and guard its keys.

    After the changes `plain` the config alone builds the network without the record's gates; by default these are
    those that take a guard away.
    """
    config = model.config
    plain = without_guard(config) if plain is None else plain
    guards = _guards(model, apply_changes(config, plain), {entry["site"] for entry in record})
    if not guards:
        logger.warning(
            f"{type(config).__name__} has no key for its activations: a process that has not imported hf_lgelu will "
            "read the saved checkpoint as a network without λ-GELU, and only list its hardness among unexpected keys"
        )
    inner = [change for change in forget_sites(config) if len(change.path) > 1]
    kept = {".".join(change.path): [change.old, change.new] for change in guards}
    return [
        *combined(config, plain, guards),
        *inner,
        ConfigChange((RECORD_KEY,), getattr(config, RECORD_KEY, None), record),
        *([ConfigChange((_GUARDED,), getattr(config, _GUARDED, None), kept)] if kept else []),
    ]


def _guards(model: PreTrainedModel, config: PreTrainedConfig, sites: set[str]) -> list[ConfigChange]:
    """The changes after which the keys that decide about these sites name this package; none if there are no keys."""
    found = changes_at(model, config, sites, NEEDS_THE_PACKAGE)
    if found:
        return found
    # A family with a table of its own knows ReLU, but not our names.
    keys = [change for change in changes_at(model, config, sites, "relu") if isinstance(change.old, str)]
    return [ConfigChange(change.path, change.old, NEEDS_THE_PACKAGE) for change in keys]


def forget_sites(config: PreTrainedConfig) -> list[ConfigChange]:
    """The config changes that remove every record and what guarded keys had said; empty if there is none."""
    return [
        ConfigChange((*path, key), value, None)
        for key in (RECORD_KEY, _GUARDED)
        for path, value in _kept(config, key, ())
    ]


def without_guard(config: PreTrainedConfig) -> list[ConfigChange]:
    """The config changes that have each guarded key say what it said of the plain network."""
    return [
        ConfigChange(path, guard, plain) for path, plain, guard in _guarded(config) if _value(config, path) == guard
    ]


def with_guard(config: PreTrainedConfig) -> list[ConfigChange]:
    """The reverse of `without_guard`."""
    return [
        ConfigChange(path, plain, guard) for path, plain, guard in _guarded(config) if _value(config, path) == plain
    ]


def _guarded(config: PreTrainedConfig) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(path, what it says of the plain network, its guard) of every guarded key."""
    for path, guards in _kept(config, _GUARDED, ()):
        for key, (plain, guard) in guards.items():
            yield (*path, *key.split(".")), plain, guard


def recorded_models(
    model: nn.Module, enclosing: SiteRecord | None = None
) -> Iterator[tuple[PreTrainedModel, SiteRecord]]:
    """(model, record) of every PreTrainedModel in a tree whose config holds a record of its own.

    A record that equals the enclosing model's is that one: inner models share or copy the config.
    """
    if isinstance(model, PreTrainedModel):
        record = getattr(model.config, RECORD_KEY, None)
        if record and record != enclosing:
            yield model, record
        enclosing = record
    for child in model.children():
        yield from recorded_models(child, enclosing)


def checked_record(record: Any) -> SiteRecord:
    """The record, or a ValueError where it is none: a config can be written by anybody."""
    if not isinstance(record, list) or not all(
        isinstance(entry, Mapping) and isinstance(entry.get("site"), str) for entry in record
    ):
        raise ValueError(f"the config's {RECORD_KEY!r} is no record of λ-GELU sites: {str(record)[:80]}")
    return record


def site_place(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """(parent, attribute) of a site, or (None, attribute); with or without the name of the model below the head."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        parent_name, _, attribute = candidate.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
        except AttributeError:
            continue
        if isinstance(getattr(parent, attribute, None), nn.Module):
            return parent, attribute
    return None, attribute


def _kept(config: PreTrainedConfig, key: str, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path of a config or sub-config, what it holds under `key`), where it holds something."""
    found = getattr(config, key, None)
    if found is not None:
        yield path, found
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _kept(value, key, (*path, name))


def _value(config: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        config = config.get(step) if isinstance(config, Mapping) else getattr(config, step, None)
    return config
