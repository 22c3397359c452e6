"""The original, its plain swap and the converted network beside each other, on inputs that nothing was fitted on."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from hf_lgelu.comparing.net_comparison import LiveUnits, compare_networks_on
from hf_lgelu.models.surgery import TemporaryRelu
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import Compared, compared_outputs
from hf_lgelu.networks.run import run_example
from hf_lgelu.processes import each_has
from hf_lgelu.refit.report import Evaluation


def evaluate_conversion(
    original: nn.Module,
    converted: nn.Module,
    substitution: TemporaryRelu,
    batches: Iterable[Batch],
    outputs: Sequence[str] | None = None,
) -> tuple[Evaluation | None, tuple[float, ...]]:
    """The evaluation of the three networks, and the distance of the converted one from the original on each sample.

    They are None and () if no process has a prediction that is no padding. `substitution` makes the plain swap of the
    original. Every process must call, with batches of its own.
    """

    def swapped(inputs: Any) -> Compared:
        with substitution.applied():
            return compared_outputs(original, inputs, outputs)

    live = LiveUnits({name: converted.get_submodule(name) for name in substitution.gates})

    def counted(model: nn.Module, inputs: Any) -> Any:
        with live.counting(inputs):
            return run_example(model, inputs)

    runs = {"direct": swapped, "refitted": lambda inputs: compared_outputs(converted, inputs, outputs, counted)}
    score, found = compare_networks_on(original, runs, batches, outputs, over_processes=True)
    direct, refitted = found["direct"], found["refitted"]
    rows, gaps = refitted.first.rows, refitted.first.gaps
    counts = zip(*each_has((live.live, live.outputs)), strict=True)
    live.live, live.outputs = (sum(part, Counter()) for part in counts)
    if not rows:
        return None, ()
    return Evaluation(rows, len(gaps), score.values, direct.change, refitted.change, live.shares), gaps
