import pytest
from lgelu_lab.report.paper_values import NOT_AT_HAND, PaperValues
from lgelu_lab.report.tables.basis import basis_table
from lgelu_lab.report.tables.correlation import correlation_table
from lgelu_lab.report.tables.coverage import coverage_table
from lgelu_lab.report.tables.glance import glance_table
from lgelu_lab.report.tables.profiles import profile_table
from lgelu_lab.report.tables.related import related_table
from lgelu_lab.studies.experiments import STUDIES

# Over the two sites: |2 − 1| + |4 − 2| = 3 and 0, so V = 1.5; mean λ in the last epoch 2.5.
PATH = [{"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 1.0}]


def rows(table):
    return {tuple(row[:2]): dict(zip(table.header, row, strict=True)) for row in table.texts}


def test_table_one_by_hand(record_of):
    gelu = [record_of(seed=seed, scores=(0.1, 0.9 - 0.01 * seed, 0.8)) for seed in range(3)]
    soft = [record_of(activation="lambda_gelu", hardness=PATH, seed=seed) for seed in range(2)]
    found = rows(profile_table([*gelu, *soft]))
    assert found["mlp-adult", "GELU"] == {
        "Benchmark": "mlp-adult", "Activation": "GELU", "Seeds": "3", "Epochs × samples": "3 × 100 [a]",
        "Best validation score": "0.8900 ± 0.0100", "Its epoch": "2 ± 0", "Mean λ, last epoch": "–", "Drift V_λ": "–",
    }  # fmt: skip
    uniform = found["mlp-adult", "λ-GELU uniform"]
    assert (uniform["Seeds"], uniform["Mean λ, last epoch"], uniform["Drift V_λ"]) == (
        *("2 of 3", "2.50 ± 0.00", "1.50 ± 0.00"),
    )


def test_table_one_has_a_row_for_every_run_of_the_study_and_calls_it_missing(record_of):
    found = rows(profile_table([record_of(), record_of(activation="silu")]))
    missing = ["ReLU", "λ-GELU uniform", "λ-GELU increasing", "λ-GELU decreasing"]
    for label in missing:
        assert list(found["mlp-adult", label].values())[2:] == ["missing", *["–"] * 5]
    elsewhere = [key for key in found if key[0] != "mlp-adult"]
    assert elsewhere == [(name, "all") for name in STUDIES["profiles"].benchmarks if name != "mlp-adult"]
    assert ("mlp-adult", "SiLU") not in found
    assert list(rows(profile_table([record_of(benchmark="mlp-digits")]))) == [("mlp-digits", "GELU")]


def test_table_one_of_perplexity_takes_the_lowest_with_two_digits(record_of):
    fields = {"metric": "perplexity", "greater_is_better": False, "benchmark": "gpt2-wikitext2"}
    table = profile_table([record_of(scores=(90.0, 30.125, 31.0), relu_scores=(99.0,) * 3, **fields)])
    assert rows(table)["gpt2-wikitext2", "GELU"]["Best validation score"] == "30.12"
    assert table.caption.startswith("Scores are perplexity (lower is better).")


def test_table_one_beside_the_paper(record_of):
    values = {"best_validation_score": (0.5, 0.25), "mean_hardness": (3.0, None)}
    paper = PaperValues({"mlp-adult": {"lambda_gelu-uniform": values}})
    table = profile_table([record_of(), record_of(activation="lambda_gelu", hardness=PATH)], paper)
    found = rows(table)
    assert found["mlp-adult", "λ-GELU uniform"]["Best validation score, paper"] == "0.5000 ± 0.2500"
    assert found["mlp-adult", "λ-GELU uniform"]["Mean λ, last epoch, paper"] == "3.00"
    assert found["mlp-adult", "GELU"]["Best validation score, paper"] == "–"
    assert "Drift V_λ, paper" not in table.header
    assert NOT_AT_HAND not in table.notes
    assert NOT_AT_HAND in profile_table([record_of()]).notes


def test_seeds_of_different_length_are_both_named(record_of):
    short = record_of(seed=1, scores=(0.5, 0.6), relu_scores=(0.5, 0.6))
    table = profile_table([record_of(), short])
    assert rows(table)["mlp-adult", "GELU"]["Epochs × samples"] == "3 or 2 × 100 [a]"
    assert "3 of 50 epochs" in table.notes[0]
    assert "2 of 50 epochs" in table.notes[0]


def test_related_activations_are_compared_by_seed(record_of):
    runs = [
        record_of(seed=0, scores=(0.5, 0.5, 0.80)),
        record_of(seed=1, scores=(0.5, 0.5, 0.60)),
        record_of(seed=1, activation="mish", scores=(0.5, 0.7, 0.65)),
        record_of(seed=2, activation="mish", scores=(0.5, 0.9, 0.65)),
    ]
    table = related_table(runs)
    found = rows(table)
    assert found["mlp-adult", "Mish"]["Best validation score"] == "0.8000 ± 0.1414"
    assert found["mlp-adult", "Mish"]["Minus GELU"] == "+0.1000"  # seed 1 alone has a GELU run
    assert found["mlp-adult", "GELU"]["Minus GELU"] == "–"
    assert found["mlp-adult", "PReLU"]["Best validation score"] == "missing"
    assert [label for _, label in found] == [
        *("ReLU", "GELU", "SiLU", "Mish", "PReLU", "Swish, learnable β"),
        *("λ-GELU uniform", "λ-GELU increasing", "λ-GELU decreasing"),
    ]
    assert related_table([record_of(), record_of(activation="relu")]) is None


def test_glance_reads_the_relu_network_that_each_way_ends_with(record_of):
    early = record_of(scores=(0.5, 0.6, 0.66), relu_scores=(0.1, None, None))
    early.config["relufication"] = True
    runs = [
        record_of(scores=(0.9, 0.9, 0.8), relu_scores=(0.1, 0.1, 0.7)),
        record_of(activation="lambda_gelu", harden=True, hardness=PATH, relu_scores=(0.1, 0.1, 0.77)),
        early,
    ]
    ((benchmark, *scores),) = glance_table(runs).texts
    assert benchmark == "mlp-adult [a]"
    one = "(1 of 3 seeds)"
    assert scores == [f"0.8000 {one}", f"0.7000 {one}", f"0.7700 {one}", f"0.6600 {one}", "missing"]


def test_coverage_counts_and_names(record_of):
    experiments = STUDIES["profiles"].build(("mlp-adult",))
    records = [record_of(name=experiment.name) for experiment in experiments[:-2]]
    failed = {experiments[-1].name: "OSError: disk", "mlp-adult/gelu-seed0": "done again since"}
    table = coverage_table([*records, record_of(name="mlp-adult/mine")], failed)
    found = rows(table)
    row = found["profiles", "mlp-adult"]
    names = [experiment.name.removeprefix("mlp-adult/") for experiment in experiments[-2:]]
    assert row["Runs"] == f"{len(experiments) - 2} of {len(experiments)}"
    assert row["Missing"] == f"{', '.join(names)} (1 failed)"
    assert found["profiles", "gpt2-wikitext2"]["Missing"] == "all"
    assert {study for study, _ in found} == {"grid", "profiles", "substitution", "related"}
    assert table.notes == (
        f"Failed: {experiments[-1].name}: OSError: disk",
        "Of no study, and shown all the same: mlp-adult/mine.",
    )


def test_coverage_of_a_toy_benchmark_does_not_ask_for_the_paper(record_of):
    table = coverage_table([record_of(benchmark="mlp-digits", name="mlp-digits/gelu-seed0")])
    assert {row[0] for row in table.texts} == {"quickstart"}


def test_the_basis_names_seeds_epochs_samples_recipe_machine_and_differences(record_of):
    table = basis_table([record_of(seed=2), record_of(seed=0), record_of(name="grid/mlp-adult/gelu-seed0")])
    profile, grid = (dict(zip(table.header, row, strict=True)) for row in table.texts)
    assert (profile["Benchmark"], grid["Benchmark"]) == ("mlp-adult", "mlp-adult, grid")
    assert profile["Seeds"] == "0, 2"
    assert profile["Epochs"] == "3"
    assert profile["Training samples"] == "100"
    assert profile["Evaluated on"] == "accuracy on 50 rows of test"
    assert profile["Recipe"] == "sgd, learning rate 0.05, batch 64"
    assert profile["Machine"] == "abacus, 1 thread"
    assert "3 of 50 epochs; 100 of 32,561 training samples" in profile["Unlike the paper"]
    assert "torch 1, transformers 2" in table.notes[0]


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ({"accelerators": ["NVIDIA H200"]}, "NVIDIA H200"),
        ({"threads_per_process": 4, "processes": 2}, "2 × abacus, 4 threads"),
    ],
)
def test_the_basis_names_accelerators_and_processes(record_of, hardware, words):
    run = record_of()
    run.hardware.update(hardware)
    assert dict(zip(basis_table([run]).header, basis_table([run]).texts[0], strict=True))["Machine"] == words


def test_the_correlation_table_says_undefined_never_nan_or_zero(record_of):
    runs = [
        record_of(activation="lambda_gelu", init_mode="uniform", hardness=PATH),
        record_of(activation="lambda_gelu", init_mode="increasing", hardness=[{"a": 1.0, "b": 2.0}] * 3),
    ]
    ((benchmark, modes, seeds, start, half, last),) = correlation_table(runs).texts
    assert (benchmark, modes, seeds) == ("mlp-adult", "uniform and increasing", "1")
    assert (start, half, last) == ("undefined", "undefined, epoch 1", "−1.00, epoch 3")
    assert correlation_table([record_of()]) is None
