"""Write docs/api.md: every public name of hf_lgelu, grouped by road, with its signature and what it does.

python scripts/api_page.py            # writes the page
python scripts/api_page.py --check    # exits with 1 if the page is not what would be written
"""

import argparse
import dataclasses
import inspect
import pkgutil
import sys
from pathlib import Path
from typing import Any

import hf_lgelu

PAGE = Path(__file__).parents[1] / "docs" / "api.md"

HEAD = """# Every public name

Written by `scripts/api_page.py` from the docstrings, which hold the arguments, the errors and most an example
(`help(hf_lgelu.export_relu)`).

**In place or copy.** A function whose text says "Changes `model` in place." does so and returns a report or nothing. \
Every other one leaves its model as it is, and what it returns is new. After an error nothing has changed.

**Words.** `inputs` is one batch (a tensor, a mapping of keyword arguments, a sequence of positional ones); `data` is \
many. `kinds` are kinds of activations, `granularity` how many λ a layer has, `strategy` how often something happens. \
`tolerance` is in `hardness_for_tolerance` and in hardening to one target ε, how far a gate is from a step in L¹; in \
`layer_targets` a relative error; in `convert_to_relu` nats of KL, or with a \
`metric` a share of the score; in `export_onnx` rounding.
"""

# Each public name stands in one section; a name in none makes the script fail.
SECTIONS: dict[str, tuple[str, ...]] = {
    "The activation": (
        "lambda_gelu", "lambda_silu", "LambdaGELU", "LambdaSiLU", "hardness_for_tolerance",
    ),
    "Putting it into a model": (
        "replace_activations", "initialize_hardness", "hardness_profile", "from_pretrained",
        "MLPConfig", "MLPForClassification",
    ),
    "Training and hardening": (
        "LambdaGELUTrainer", "LambdaGELUTrainingArguments", "HardeningConfig", "HardeningCallback",
        "HardnessLogCallback",
        "hardness_parameter_groups", "anneal_hardness", "freeze_hardness",
    ),
    "Substituting": ("substitute_relu", "absorb_hardness"),
    "Converting without training": ("convert_to_relu", "ConversionConfig", "ConversionReport",),
    "Exporting": ("export_relu", "export_gelu", "export_onnx", "push_to_hub",),
    "Checking and analysing": ("compare_networks", "quantize_onnx"),
    "Errors": ("ConversionRefusedError", "UnsupportedConfigError",),
    "The package": ("__version__",),
    "In modules of their own": (
        "activation.functional.lambda_gelu_tanh", "activation.hardness.swap_error_bound",
        "activation.kernels.use_kernel", "activation.module.LambdaGELUTanh", "activation.report.kernel_report",
        "export.hub.card.write_card",
        "export.int8.equalize.equalize_ranges",
        "models.exchange.SurgeryReport", "models.hardening.is_hardened", "models.hardening.release_hardness",
        "models.operable.hardness_modules_to_save",
        "models.runtimes.runtime_warnings", "models.schedules.hardening_progress",
        "models.smooth_calls.find_smooth_calls", "models.substitution.TemporaryRelu",
        "refit.convert.Conversion", "refit.gate_costs.gate_costs", "refit.report.Evaluation",
        "refit.report.LayerRefit", "refit.report.NetChange", "registry.register_activation",
        "training.layer_targets.layer_targets", "models.optimizer_groups.separate_hardness_group",
    ),
}  # fmt: skip

# Constants have no docstring of their own.
CONSTANTS = {
    "__version__": "The version, a string.",
}


_CHANGED = ("Changes `model` in place", "Changes `optimizer` in place")


def page() -> str:
    """The whole page. Raises ValueError for a public name in no section, and for a name there that is not public."""
    listed = [name for names in SECTIONS.values() for name in names]
    differing = sorted({name for name in listed if "." not in name} ^ set(hf_lgelu.__all__))
    if differing or len(listed) != len(set(listed)):
        raise ValueError(
            f"{', '.join(differing) or 'a name twice'}: each name of hf_lgelu.__all__ belongs in one section of "
            "scripts/api_page.py"
        )
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_entry(name) for name in names]
    return "\n".join(parts)


def _entry(name: str) -> str:
    if name in CONSTANTS:
        return f"### `{name}`\n\n{CONSTANTS[name]}\n"
    documented = pkgutil.resolve_name(f"hf_lgelu.{name}")
    docstring = inspect.getdoc(documented)
    whole, text = (" ".join(part.split()) for part in (docstring, docstring.partition("\n\n")[0]))
    changed = next((words for words in _CHANGED if words in whole and words not in text), None)
    text += f" {changed}." if changed else ""
    return f"### `{name}{_signature(documented)}`\n\n{text}\n"


def _signature(documented: Any) -> str:
    """Names and defaults, without types; of a class only what it adds to the host library's."""
    if isinstance(documented, type) and issubclass(documented, Exception):
        return ""
    if isinstance(documented, type) and "__init__" not in vars(documented):
        return ""
    own = set(inspect.get_annotations(documented)) if dataclasses.is_dataclass(documented) else None
    shown, star = [], False
    for parameter in inspect.signature(documented).parameters.values():
        if own is not None and parameter.name not in own:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        shown.append(_shown(parameter))
    return f"({', '.join(shown)})"


def _shown(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}"
    default = repr(parameter.default)
    if isinstance(parameter.default, float) and len(default) > 8:
        default = f"{parameter.default:.3g}"
    return f"{parameter.name}={default if len(default) <= 40 and '<' not in default else '...'}"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the page and write nothing")
    text = page()
    if parser.parse_args().check:
        return 0 if PAGE.is_file() and PAGE.read_text("utf-8") == text else 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
