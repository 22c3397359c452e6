"""The forms in which a λ-GELU model leaves this package. Nothing here imports torch."""

import pkgutil
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExportTarget:
    """A form that `hf-lgelu export --to` writes.

    Args:
        name: after `hf-lgelu export --to`.
        description: for that command's help.
        run: "module:function", called with the model and a folder that is there; `source` is where a tokenizer or
            processor is that goes along, `inputs` are rows to compare on, None for random ones. Gives a dataclass
            that can be printed, with the `folder` of a checkpoint or the `path` of a file.
        is_checkpoint: what is written is again a checkpoint, of one with λ-GELU: it is scored, and has a card. Other
            forms are files, of any network as it is.
        is_relu: gates become ReLU, soft ones with `allow_soft=True` alone.
    """

    name: str
    description: str
    run: str
    is_checkpoint: bool = True
    is_relu: bool = False

    def export(self, *arguments: Any, **options: Any) -> Any:
        """The report of `run`."""
        return pkgutil.resolve_name(self.run)(*arguments, **options)


EXPORT_TARGETS: dict[str, ExportTarget] = {
    target.name: target
    for target in (
        ExportTarget("relu", "ReLU in the place of hard gates", "hf_lgelu.export.plain:save_relu", is_relu=True),
        ExportTarget("gelu", "GELU, with λ absorbed by the weights, exactly", "hf_lgelu.export.plain:save_gelu"),
        ExportTarget(
            "onnx",
            "the model as it is, whatever its gates, for onnxruntime",
            "hf_lgelu.export.onnx.onnx_export:save_onnx",
            is_checkpoint=False,
        ),
    )
}
