"""Convert networks that nobody here trained, and record what is left of them, each by its own measure.

    python scripts/convert_zoo.py --networks minilm smollm2 --packages runs/packages --data_dir data

The networks come from packages of the registry that carry weights. Networks of the Hub: hf-lgelu convert.
"""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

from lgelu_lab.benchmarks.real_networks import REAL
from lgelu_lab.measurements.real import RealSettings, record_real
from lgelu_lab.studies.arguments import OneLineParser

from hf_lgelu.refit.config import EFFORTS


@dataclass
class ZooArguments:
    """Which networks, on how much data."""

    networks: list[str] = field(metadata={"help": f"Of {', '.join(REAL)}.", "choices": list(REAL)})
    output_dir: str = field(default="runs/zoo", metadata={"help": "Folder of the records; those there are skipped."})
    packages: str | None = field(default=None, metadata={"help": "Folder of installed packages with weights."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})
    samples: list[int] = field(
        default_factory=lambda: list(RealSettings().samples), metadata={"help": "Sequences or images to fit on."}
    )
    efforts: list[str] = field(
        default_factory=lambda: list(RealSettings().efforts),
        metadata={
            "help": "Of the conversion on the most samples; with fewer, only the first.",
            "choices": list(EFFORTS),
        },
    )
    width_budget: float = field(default=1.0, metadata={"help": "Of the efforts above refit."})
    onnx: bool = field(default=False, metadata={"help": "Also float32 and int8 in onnxruntime: score and latency."})
    evaluation_samples: int = field(default=RealSettings().evaluation_samples, metadata={"help": "Judged on so many."})


def main() -> int:
    """Measure what has no record yet; the exit status is 1 if one could not be measured."""
    (arguments,) = OneLineParser(ZooArguments).parse()
    given = {entry.name: getattr(arguments, entry.name) for entry in fields(RealSettings) if entry.name != "seed"}
    settings = RealSettings(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
    failed = [name for name in arguments.networks if not _measured(name, settings, arguments)]
    return int(bool(failed))


def _measured(name: str, settings: RealSettings, arguments: ZooArguments) -> bool:
    packages = Path(arguments.packages) if arguments.packages is not None else None
    try:
        record = record_real(REAL[name], settings, arguments.output_dir, data_dir=arguments.data_dir, packages=packages)
    except (ValueError, RuntimeError, OSError, ImportError) as error:  # the message says what to do
        print(f"failed: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False
    for row in record.rows:
        score = "no score" if row["score"] is None else f"{row['metric']} {row['score']:.4g}"
        score = "refused" if row["refusal"] else score
        how = " ".join(filter(None, (row["method"], row["effort"], row["precision"])))
        print(f"{name}: {how}, {row['fitted_on'] or 'no'} samples: {score}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
