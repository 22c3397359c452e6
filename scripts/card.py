"""Render a model card from a run's record: `python scripts/card.py --record RUN --output CARD.md`."""

from dataclasses import dataclass, field
from pathlib import Path

from lgelu_lab.studies.cards import write_record_card
from lgelu_lab.studies.records import read_record
from transformers import HfArgumentParser


@dataclass
class CardArguments:
    """Which record, and where to."""

    record: str = field(metadata={"help": "record.json, or the folder of a run."})
    output: str = field(metadata={"help": "The card; its picture goes to figures/ beside it."})
    export: str = field(default="relu", metadata={"help": "The form described: relu, gelu or lambda_gelu."})
    repo_id: str | None = field(default=None, metadata={"help": "Hub repository of the model, user/name."})
    license: str | None = field(default=None, metadata={"help": "Licence on the card, as the Hub spells it."})


def main() -> None:
    """Write the card and print its path."""
    (arguments,) = HfArgumentParser(CardArguments).parse_args_into_dataclasses()
    path = write_record_card(
        read_record(arguments.record), Path(arguments.output), export=arguments.export, repo_id=arguments.repo_id,
        license=arguments.license,
    )  # fmt: skip
    print(path)


if __name__ == "__main__":
    main()
