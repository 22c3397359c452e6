import pytest
from lgelu_lab.report.markup import Cell
from lgelu_lab.report.paper_values import PaperValues
from lgelu_lab.report.substitution import EVALUATIONS, evaluation
from lgelu_lab.report.tables.substitution import substitution_table

HARD = [{"a": 2.0, "b": 9.0}, {"a": 70.0, "b": 90.0}, {"a": 160.0, "b": 160.0}]


def hardened(record_of, **fields):
    return record_of(activation="lambda_gelu", harden=True, **{"hardness": HARD, **fields})


def relufied(record_of, scores=(0.8, 0.9, 0.85), switched=1, **fields):
    """GELU for `switched` epochs, then ReLU."""
    relu = tuple(0.5 if number < switched else None for number in range(len(scores)))
    record = record_of(scores=scores, relu_scores=relu, **fields)
    record.config["relufication"] = True
    return record


def rows(records, at="last", **options):
    table = substitution_table(records, at, **options)
    return {(row[0], row[1]): dict(zip(table.header, row, strict=True)) for row in table.texts}


def test_each_evaluation_is_the_one_asked_for(record_of):
    run = hardened(record_of, scores=(0.8, 0.9, 0.85), relu_scores=(0.75, 0.6, 0.7))
    found = {at: evaluation(run, at) for at in EVALUATIONS}
    assert {at: score.epoch.epoch for at, score in found.items()} == {"best": 2, "best_substituted": 1, "last": 3}
    assert {at: (score.as_is, score.relu) for at, score in found.items()} == {
        "best": (0.9, 0.6), "best_substituted": (0.8, 0.75), "last": (0.85, 0.7),
    }  # fmt: skip
    assert {at: score.early for at, score in found.items()} == {"best": True, "best_substituted": True, "last": False}
    with pytest.raises(ValueError, match="'first'; accepted: best, best_substituted, last"):
        evaluation(run, "first")


@pytest.mark.parametrize(("smallest", "early"), [(79.7, True), (79.79, False), (160.0, False)])
def test_a_gate_counts_as_hard_from_half_the_target(record_of, smallest, early):
    run = hardened(record_of, hardness=[{"a": 160.0, "b": smallest}] * 3)
    assert evaluation(run, "last").early is early  # the paper's target is 159.577
    run.config["target_hardness"] = 2 * smallest + 0.1
    assert evaluation(run, "last").early is True


def test_a_run_that_swapped_early_is_its_own_relu_network_after_the_switch(record_of):
    run = relufied(record_of, scores=(0.95, 0.8, 0.85))
    best, best_relu, last = (evaluation(run, at) for at in EVALUATIONS)
    assert (best.epoch.epoch, best.early, best.is_relu, best.relu) == (1, True, False, 0.5)
    assert (best_relu.epoch.epoch, best_relu.is_relu, best_relu.relu) == (3, True, 0.85)
    assert (last.as_is, last.relu, last.change, last.max_logit_change, last.unchanged_predictions) == (
        *(0.85, 0.85, 0.0, 0.0, 1.0),
    )
    lower = relufied(record_of, scores=(9.0, 5.0, 6.0), metric="perplexity", greater_is_better=False)
    assert evaluation(lower, "best_substituted").epoch.epoch == 2


def test_a_relu_network_from_the_start_was_never_substituted(record_of):
    assert evaluation(record_of(activation="relu", relu_scores=(None,) * 3), "last") is None


def test_the_tables_numbers_by_hand(record_of):
    runs = [hardened(record_of, seed=seed, relu_scores=(0.5, 0.6 + 0.1 * seed, 0.7)) for seed in (0, 1)]
    row = rows(runs, "best")["mlp-adult", "λ-GELU uniform, hardened"]
    assert row == {
        "Benchmark": "mlp-adult", "Activation": "λ-GELU uniform, hardened", "Seeds": "2 of 3",
        "Epochs × samples": "3 × 100 [a]", "Epoch": "2 ± 0 †", "Smallest λ": "70.0 ± 0.0",
        "As is": "0.9000 ± 0.0000", "ReLU substituted": "0.6500 ± 0.0707", "Change": "−0.2500 ± 0.0707",
        "Largest logit change": "0.5", "Unchanged predictions": "0.5000 ± 0.0000",
    }  # fmt: skip


def test_rows_before_the_gates_are_hard_are_marked_and_explained(record_of):
    table = substitution_table([hardened(record_of)], "best")
    (row,) = [dict(zip(table.header, row, strict=True)) for row in table.rows if row[1] == "λ-GELU uniform, hardened"]
    assert (row["Epoch"].tone, row["Smallest λ"].tone) == ("warning", "warning")
    assert any(note.startswith("† In at least one seed") for note in table.notes)
    last = substitution_table([hardened(record_of)], "last")
    assert "†" not in "".join(text for row in last.texts for text in row) + "".join(last.notes)


def test_the_rival_shows_one_network_and_mixed_seeds_count_the_exchange_where_there_was_one(record_of):
    label = "GELU → ReLU at 25%, trained on"
    after = rows([relufied(record_of)], "last")["mlp-adult", label]
    assert after["As is"] == after["ReLU substituted"] == "0.8500"
    assert after["Change"] == after["Largest logit change"] == after["Unchanged predictions"] == "–"
    mixed = [relufied(record_of, seed=0), relufied(record_of, seed=1, scores=(0.9, 0.8, 0.85))]
    row = rows(mixed, "best")["mlp-adult", label]
    assert row["Epoch"] == "2 ± 1 †"  # 2 and 1
    assert row["ReLU substituted"] == "0.7000 ± 0.2828"  # 0.9 and 0.5
    assert row["Change"] == "−0.2000 ± 0.2828"  # 0 and −0.4
    assert row["Unchanged predictions"] == "0.7500 ± 0.3536"  # 1 and 0.5
    assert "→ ReLU: from the switch on" in " ".join(substitution_table(mixed, "best").notes)


def test_of_perplexity_a_rise_is_worse_and_the_caption_says_so(record_of):
    run = record_of(
        benchmark="gpt2-wikitext2", metric="perplexity", greater_is_better=False, scores=(90.0, 30.5, 31.0),
        relu_scores=(99.0, 95.0, 92.25),
    )  # fmt: skip
    table = substitution_table([run], "best")
    (row,) = [dict(zip(table.header, row, strict=True)) for row in table.rows if row[1] == "GELU"]
    assert (row["As is"], row["ReLU substituted"], row["Change"]) == ("30.50", "95.00", Cell("+64.50", "worse"))
    assert "of perplexity lower is better, so there a change above zero is a loss" in table.caption


def test_missing_runs_are_rows_without_a_number(record_of):
    found = rows([record_of()])
    assert list(found["mlp-adult", "λ-GELU uniform, hardened"].values())[2:] == ["missing", *["–"] * 8]
    assert list(found["mlp-adult", "GELU → ReLU at 25%, trained on"].values())[2] == "missing"
    assert list(found["deit-tiny-imagenet", "all"].values())[2:] == ["missing", *["–"] * 8]
    assert list(rows([record_of(benchmark="mlp-digits")])) == [("mlp-digits", "GELU")], "no row for what no one asked"


def test_neither_grid_nor_other_activations_nor_learned_gates_are_among_the_papers_rows(record_of):
    soft = [{"a": 1.5}] * 3
    runs = [
        record_of(),
        record_of(seed=1, name="grid/mlp-adult/gelu-seed1"),
        record_of(activation="silu"),
        record_of(activation="lambda_gelu", hardness=soft),
    ]
    found = rows(runs)
    assert found["mlp-adult", "GELU"]["Seeds"] == "1 of 3"
    assert not {"SiLU", "λ-GELU uniform"} & {label for _, label in found}
    assert list(rows(runs, learned=True)) == [("mlp-adult", "λ-GELU uniform")]


def test_the_papers_value_stands_at_its_own_choice_of_checkpoint_alone(record_of):
    paper = PaperValues({"mlp-adult": {"GELU": {"substituted": (0.123, 0.004)}}})
    assert rows([record_of()], "best", paper=paper)["mlp-adult", "GELU"]["ReLU substituted, paper"] == "0.1230 ± 0.0040"
    assert "ReLU substituted, paper" not in rows([record_of()], "last", paper=paper)["mlp-adult", "GELU"]


def test_what_was_not_measured_is_a_dash(record_of):
    run = record_of()
    epochs = [vars(epoch) | {"relu_unchanged_predictions": None} for epoch in run.epochs]
    run = type(run)(**{**vars(run), "epochs": tuple(type(run.epochs[0])(**epoch) for epoch in epochs)})
    assert rows([run])["mlp-adult", "GELU"]["Unchanged predictions"] == "–"
