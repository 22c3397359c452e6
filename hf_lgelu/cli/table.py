"""The table COMMANDS: what `hf-lgelu` offers, one row a command.

A new command is a row here and a module with its function. Nothing here imports torch.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from hf_lgelu.cli.options import (
    BATCH_SIZE,
    COLUMNS,
    DATA,
    DISABLE_TQDM,
    EVALUATION,
    FACTS,
    LICENSE,
    MODEL,
    OUTPUT_DIR,
    OUTPUTS,
    OVERWRITE,
    PATH,
    PUBLISHING,
    SEED,
    Option,
    at_least,
    gates_to_keep,
    positive_number,
    switch,
    target_gate,
)
from hf_lgelu.export.targets import EXPORT_TARGETS
from hf_lgelu.refit.dials import EFFORTS, FAR_KL, Dials


@dataclass(frozen=True)
class Command:
    """One word after `hf-lgelu`.

    `run` is "module:function", called with the parsed arguments. `examples` are two calls. `complaint` says what is
    wrong with arguments that are right one by one, or None.
    """

    name: str
    summary: str
    run: str
    options: tuple[Option, ...]
    examples: tuple[str, str]
    complaint: Callable[[argparse.Namespace], str | None] = lambda arguments: None


def _files_have_no_card(arguments: argparse.Namespace) -> str | None:
    if EXPORT_TARGETS[arguments.to].is_checkpoint:
        return None
    if arguments.push_to_hub is not None:
        upload = f"push what --to {arguments.to} writes with `hf upload`"
        return f"--push_to_hub: only checkpoints are pushed with a card; {upload}"
    given = [f"--{name}" for name in ("license", "facts") if getattr(arguments, name) is not None]
    return f"{' and '.join(given)}: for a card, and --to {arguments.to} writes none; leave that out" if given else None


def _privacy_is_of_a_push(arguments: argparse.Namespace) -> str | None:
    if arguments.private and arguments.push_to_hub is None:
        return "--private: of a push, and nothing is pushed without --push_to_hub; add that, or leave --private out"
    return None


# What says which rows of a set are read, and how; of the commands other than convert all of it is of --evaluation.
_OF_EVALUATION = ("evaluation_split", "evaluation_config", "max_eval_samples")
_OF_ANY_SET = ("column", "pair_column", "label_column", "sequence_length", "batch_size")


def _evaluation_is_named(arguments: argparse.Namespace, options: Sequence[str]) -> str | None:
    given = [f"--{name}" for name in options if getattr(arguments, name) is not None]
    if given and arguments.evaluation in (None, "none"):
        return f"nothing reads {' and '.join(given)} without a set that --evaluation names; name one, or leave that out"
    return None


def _convert_fits(arguments: argparse.Namespace) -> str | None:
    try:
        Dials(**{dial.name: getattr(arguments, dial.name) for dial in fields(Dials)})
    except ValueError as error:
        return str(error)
    if arguments.equalize and arguments.target.partition(":")[0] not in ("relu", "leaky_relu"):
        return f"--equalize: units of {arguments.target} cannot be rescaled, those of relu and leaky_relu can"
    # Left out, --evaluation may be another split of --data.
    unused = None if arguments.evaluation is None else _evaluation_is_named(arguments, _OF_EVALUATION)
    return unused or _privacy_is_of_a_push(arguments)


def _harden_fits(arguments: argparse.Namespace) -> str | None:
    if arguments.allow_soft and not EXPORT_TARGETS[arguments.to].is_relu:
        return f"--allow_soft: --to {arguments.to} takes soft gates as they are, and does not ask; leave it out"
    refusals = (_files_have_no_card, _files_have_no_scores, _privacy_is_of_a_push, _evaluation_is_used)
    return next(filter(None, (refusal(arguments) for refusal in refusals)), None)


def _files_have_no_scores(arguments: argparse.Namespace) -> str | None:
    given = [f"--{name}" for name in ("batch_size", "label_column", "max_eval_samples") if getattr(arguments, name)]
    if given and not EXPORT_TARGETS[arguments.to].is_checkpoint:
        words = f"--to {arguments.to} compares outputs on the first rows and scores none"
        return f"{' and '.join(given)}: {words}; leave that out"
    return None


def _evaluation_is_used(arguments: argparse.Namespace) -> str | None:
    return _evaluation_is_named(arguments, (*_OF_EVALUATION, *_OF_ANY_SET))


_ROWS = (
    Command(
        name="convert",
        summary="a trained smooth network (GELU, SiLU, Mish, λ-GELU) to ReLU without training, on unlabelled inputs",
        run="hf_lgelu.cli.convert:convert",
        options=(
            MODEL,
            Option("--data", f"Unlabelled inputs like those the model meets: {DATA}.", {"required": True}),
            OUTPUT_DIR,
            Option("--data_split", "Which split of it. Left out: train.", {"default": "train"}),
            Option("--data_config", "Which of its configurations. Left out: its only one."),
            Option(
                "--max_samples",
                "At most so many of its rows, sequences or images. Left out: 8,192 rows of features, 1,024 images, or "
                "sequences of together 32,768 tokens, but at least 32.",
                {"type": at_least(1)},
            ),
            *COLUMNS,
            Option(
                "--evaluation",
                f"A second set, on which nothing is fitted: {DATA}, or none. Left out: the validation or test split "
                "of --data, if it has one.",
            ),
            *EVALUATION,
            SEED,
            BATCH_SIZE,
            OUTPUTS,
            Option(
                "--max_kl",
                "Nats of mean KL to the original (of outputs that are no class scores, relative error) from where on a "
                "result counts as far from it. Left out: 0.1.",
                {"type": positive_number, "default": FAR_KL},
            ),
            switch("--strict", "Refuse a result beyond --max_kl. Left out: its report and card warn of it."),
            Option(
                "--target",
                "What the gates become: relu, relu6, leaky_relu, hardswish or relu2; leaky_relu:0.1 has another slope "
                "than 0.01. Left out: relu.",
                {"type": target_gate, "default": "relu", "metavar": "GATE"},
            ),
            Option(
                "--keep",
                "Gates that stay smooth: how many, the dearest, or their names with commas between. Left out: none.",
                {"type": gates_to_keep, "default": 0, "metavar": "GATES"},
            ),
            Option(
                "--effort",
                "How hard it tries: refit, the maps behind the gates; place, each ReLU's kink and slope too; distill, "
                "all blocks together. Each after the ones before, and kept only where inputs held out are nearer for "
                "it. Left out: refit, with --tolerance as far as needed.",
                {"choices": EFFORTS},
            ),
            Option(
                "--width_budget",
                "So many times the units in every block: those added carry what is linear, or are copies with kinks of "
                "their own. 1.25 gives most for its size, 2 and more come as near as one likes. Left out: 1.",
                {"type": positive_number, "default": 1.0},
            ),
            Option(
                "--tolerance",
                "Nats of mean KL to the original (or relative error) on inputs held out that is to be reached: it "
                "tries harder until it is, or refuses. Left out: no such bound.",
                {"type": positive_number},
            ),
            Option(
                "--max_seconds",
                "End what is above the refit after so long, with what was reached by then. Left out: no bound.",
                {"type": positive_number},
            ),
            Option(
                "--distill_steps",
                "Steps of --effort distill: the more, the nearer, where there are inputs enough. Left out: 200, and "
                "600 where the first few bring much.",
                {"type": int},
            ),
            switch(
                "--bf16",
                "Take the steps of --effort distill with products in bfloat16: quicker where the processor or GPU has "
                "it. Left out: in the model's own precision.",
            ),
            switch(
                "--equalize",
                "Bring the units to ranges that int8 can hold together, by powers of two: what the network computes in "
                "float stays. Left out: units are as loud as they were fitted.",
            ),
            switch(
                "--resume",
                "Keep each layer that is done in a hidden folder beside --output_dir until all is saved, and go on "
                "from there. Left out: a call that was killed begins anew.",
            ),
            switch(
                "--allow_unrefitted",
                "Swap gates even where the linear maps behind them cannot be refitted. Left out: that is refused.",
            ),
            OVERWRITE,
            *PUBLISHING,
            DISABLE_TQDM,
        ),
        examples=(
            "hf-lgelu convert runs/tabular --data rows.csv --output_dir out/relu",
            "hf-lgelu convert you/your-gpt2 --data you/texts --max_samples 64 --output_dir out/relu --push_to_hub",
        ),
        complaint=_convert_fits,
    ),
    Command(
        name="harden",
        summary="a hardened λ-GELU checkpoint to a plain ReLU, GELU or ONNX one",
        run="hf_lgelu.cli.harden:harden",
        options=(
            MODEL,
            OUTPUT_DIR,
            Option(
                "--to",
                f"{'; '.join(f'{target.name}: {target.description}' for target in EXPORT_TARGETS.values())}. Left out: "
                "relu.",
                {"choices": tuple(EXPORT_TARGETS), "default": "relu"},
            ),
            Option(
                "--evaluation",
                f"Inputs on which the checkpoint and what becomes of it are compared, with scores where there are "
                f"labels: {DATA}. Left out: some random inputs.",
            ),
            *EVALUATION,
            *COLUMNS,
            SEED,
            BATCH_SIZE,
            switch("--allow_soft", "Put ReLU in even where gates are soft. Left out: that is refused."),
            OVERWRITE,
            FACTS,
            *PUBLISHING,
            DISABLE_TQDM,
        ),
        examples=(
            "hf-lgelu harden runs/tabular --output_dir out/relu --evaluation test.csv",
            "hf-lgelu harden runs/soft --to gelu --output_dir out/gelu",
        ),
        complaint=_harden_fits,
    ),
    Command(
        name="check",
        summary="is a checkpoint piecewise linear, what would ReLU cost, what stands in the way; nothing is written",
        run="hf_lgelu.cli.check:check",
        options=(
            MODEL,
            Option(
                "--evaluation",
                f"Inputs on which the swap is tried, with scores where there are labels: {DATA}. Left out: some "
                "random inputs.",
            ),
            *EVALUATION,
            *COLUMNS,
            SEED,
            BATCH_SIZE,
            OUTPUTS,
            DISABLE_TQDM,
        ),
        examples=("hf-lgelu check you/your-bert", "hf-lgelu check runs/tabular --evaluation test.csv"),
        complaint=_evaluation_is_used,
    ),
    Command(
        name="profile",
        summary="the hardness λ of every gate of a λ-GELU checkpoint, as text and as a picture",
        run="hf_lgelu.cli.profile:profile",
        options=(
            MODEL,
            Option("--figure", "PNG to write. Left out: none.", {"metavar": "FILE", "type": PATH}),
            switch("--overwrite", "Replace a picture that is there. Left out: it is refused."),
        ),
        examples=("hf-lgelu profile runs/tabular", "hf-lgelu profile runs/tabular --figure hardness.png"),
    ),
    Command(
        name="card",
        summary="a model card for a λ-GELU checkpoint, or for what harden made of one",
        run="hf_lgelu.cli.card:card",
        options=(
            MODEL,
            FACTS,
            Option("--repo_id", "Hub repository that the card is for, e.g. user/model. Left out: none is named."),
            LICENSE,
            switch("--overwrite", "Replace a card that is there. Left out: it is refused."),
        ),
        examples=(
            "hf-lgelu card runs/tabular --license mit",
            "hf-lgelu card out/relu --facts runs/tabular --overwrite",
        ),
    ),
    Command(
        name="kernels",
        summary="which implementations of the activation this machine has, and why others are not used",
        run="hf_lgelu.cli.kernels:kernels",
        options=(),
        examples=("hf-lgelu kernels", "LGELU_KERNEL=eager hf-lgelu kernels"),
    ),
)

COMMANDS: dict[str, Command] = {command.name: command for command in _ROWS}
