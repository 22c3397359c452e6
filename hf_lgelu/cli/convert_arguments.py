"""What scripts/convert.py takes."""

from dataclasses import dataclass, field

from lgelu_lab.benchmarks.table import BENCHMARKS


@dataclass
class ConvertArguments:
    """A checkpoint with smooth gates, inputs that are like those it will meet, and where its ReLU form goes."""

    model: str = field(metadata={"help": "Folder or Hub id of the checkpoint."})
    calibration: str = field(
        metadata={
            "help": f"Unlabelled inputs: a benchmark's name ({', '.join(BENCHMARKS)}), of which the training rows are "
            "taken, or a data set's folder or Hub id."
        }
    )
    output_dir: str = field(metadata={"help": "Folder of the ReLU checkpoint; complete or not there."})
    max_calibration_samples: int | None = field(
        default=None,
        metadata={
            "help": "At most so many rows, sequences or images of it. Left out: 8,192 rows of features, 1,024 images, "
            "or sequences of together 32,768 tokens, but at least 32."
        },
    )
    calibration_split: str = field(default="train", metadata={"help": "Of a data set that is no benchmark."})
    calibration_config: str | None = field(default=None, metadata={"help": "Which of a data set's configurations."})
    column: str | None = field(
        default=None, metadata={"help": "The column of texts, images or features; left out, the one that fits."}
    )
    label_column: str | None = field(
        default=None, metadata={"help": "The column of classes, for scores alone; left out, label or labels."}
    )
    sequence_length: int | None = field(
        default=None, metadata={"help": "Tokens of a sequence; left out, what the model takes, at most 1,024."}
    )
    evaluation: str | None = field(
        default=None,
        metadata={
            "help": "A second set, on which nothing is fitted, given like --calibration, or none. Left out: the "
            "benchmark's evaluation rows; of a data set its validation or test split, if it has one."
        },
    )
    evaluation_split: str | None = field(default=None, metadata={"help": "Of a data set that is no benchmark."})
    evaluation_config: str | None = field(default=None, metadata={"help": "Which of a data set's configurations."})
    max_evaluation_samples: int | None = field(default=None, metadata={"help": "At most so many of its rows."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the benchmarks' data."})
    seed: int = field(default=0, metadata={"help": "Of the choice of the inputs; nothing else is random."})
    batch_size: int | None = field(default=None, metadata={"help": "Inputs computed at once; left out, by their kind."})
    allow_unrefitted: bool = field(
        default=False, metadata={"help": "Swap gates even where the linear maps behind them cannot be refitted."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace an output folder that is not empty."})
    push_to_hub: str | None = field(
        default=None,
        metadata={
            "help": "Push the folder with its card to this Hub repository, e.g. user/model; without a value, to one of "
            "yours that is named like the folder.",
            "nargs": "?",
            "const": "",
        },
    )
    private: bool = field(default=False, metadata={"help": "Make a new Hub repository a private one."})
    license: str | None = field(
        default=None, metadata={"help": "Licence on the card, as the Hub spells it; left out, the original's card's."}
    )
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bar."})
