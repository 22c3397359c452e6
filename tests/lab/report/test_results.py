"""The main results, and what holds of the paper's claims, by hand."""

import dataclasses
import math
import statistics

import pytest
from lgelu_lab.report.claims import CLAIMS
from lgelu_lab.report.paper import PaperValues, read_paper_values

HARD = [{"a": 160.0, "b": 160.0}] * 3


def hardened(record_of, relu=0.85, **fields):
    return record_of(activation="lambda_gelu", harden=True, hardness=HARD, relu_scores=(0.1, 0.1, relu), **fields)


def converted(measurement_of, score, original, *, rows=64, seed=0, metric="accuracy", benchmark="mlp-adult"):
    models = {"gelu": {"run": "g", "metric": metric, "score": original, "relu_score": 0.5, "target_hardness": None}}
    row = {"model": "gelu", "method": "refit", "original_score": original, "refusal": None}
    more = {**row, "rows": 2 * rows, "score": score}
    rung = {**more, "method": "distill", "score": 0.2}
    return measurement_of(
        "conversion", [{**row, "rows": rows, "score": 0.1}, more, rung], seed=seed, models=models, benchmark=benchmark
    )


def test_a_row_has_every_way_and_the_refit_on_the_most_rows(record_of, measurement_of, table_of, relufied):
    runs = [record_of(), hardened(record_of), relufied(), record_of(activation="relu", relu_scores=(None,) * 3)]
    paper = PaperValues({"mlp-adult": {"gelu": {"as_is": (0.85, None), "substituted": (0.8, None)}}}, "cited")
    table = table_of("results", runs, [converted(measurement_of, 0.8125, 0.85)], paper=paper)
    (row,) = table.rows
    assert row[0] == "mlp-adult [a]"
    assert [text.partition(" (")[0] for text in row[1:7]] == [
        "0.8500",
        "0.7000",
        "0.8125",
        "0.8500",
        "0.8500",
        "0.8500",
    ]
    assert row[7] == "0.85, 0.8, –"


def test_int8_takes_so_much_of_the_smooth_networks_time_by_width(record_of, measurement_of, table_of):
    row = {"score": 0.5, "metric": "accuracy", "judged": 400, "refusal": None}
    rows = [
        {**row, "method": method, "width": width, "precision": precision, "call_ms": ms}
        for precision, times in (("float32", (50, 50, 50)), ("int8", (10, 9, 12)))
        for (method, width), ms in zip((("original", None), ("converted", 1), ("converted", 2)), times, strict=True)
    ]
    one = {"model": "", "precision": "int8-all", "batch_size": 64, "median_ms": 4, **row}
    here = [{**one, "model": "gelu"}, {**one, "model": "hardened_relu", "median_ms": 3}]
    measured = [measurement_of("real", rows, benchmark="minilm"), measurement_of("int8", here, benchmark="mlp-adult")]
    table = table_of("roads", [record_of()], measured)
    assert {row[0]: row[-1] for row in table.rows} == {"MLP, Adult": "0.75", "MiniLM-L6": "0.90; 1.20 (2 ×)"}


def judged(table_of, claim, *arguments, **options):
    """{network: (verdict, number)} of one claim."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lgelu_lab.report.claims.CLAIMS", {claim: CLAIMS[claim]})  # a table of all takes a second
        return {row[1]: (row[3], row[2]) for row in table_of("claims", *arguments, **options).rows}


def learned(record_of, mode, last, **fields):
    path = [{"a": 1.0, "b": 1.1, "c": 1.2}] * 2 + [dict(zip("abc", last, strict=True))]
    return record_of(activation="lambda_gelu", init_mode=mode, hardness=path, **fields)


def test_the_order_of_layers_is_judged_by_its_worst_pair(record_of, table_of):
    def order(*runs):
        return judged(table_of, "order", runs)

    first, second = (learned(record_of, mode, (1, 2, 3), benchmark="mlp-fmnist") for mode in ("uniform", "increasing"))
    assert order(first, second) == {"mlp-fmnist": ("holds so far", "ρ_S +1.00 over 3 layers, 1 of 3 pairs")}
    half, opposite = (learned(record_of, "decreasing", p, benchmark="mlp-fmnist") for p in ((1, 3, 2), (3, 2, 1)))
    assert order(first, second, half) == {"mlp-fmnist": ("holds", "ρ_S +0.50 to +1.00 over 3 layers")}
    others = [learned(record_of, mode, (1, 2, 3), benchmark="resnet18-cifar10") for mode in ("uniform", "increasing")]
    found = order(first, second, opposite, *others)
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "mlp-fmnist": "does not hold", "resnet18-cifar10": "holds so far",
    }  # fmt: skip
    adult = [learned(record_of, mode, (1, 2, 3)) for mode in ("uniform", "increasing")]
    assert order(*adult) == {}, "the claim is on vision"


def test_lambda_gelu_is_compared_with_gelu_seed_by_seed(record_of, table_of):
    def runs(mode=None, shift=0.0):
        made = []
        for seed in range(3):
            scores = {"scores": (0.5, 0.9 + shift + 0.001 * seed * (mode is not None), 0.8), "seed": seed}
            made.append(learned(record_of, mode, (1, 2, 3), **scores) if mode else record_of(**scores))
        return made

    def found(*more):
        return judged(table_of, "at-least-gelu", [*runs(), *runs("uniform", 0.01), *more])["mlp-adult"]

    # 0.010, 0.011 and 0.012: ± 4.303 · 0.001 / √3
    one = "accuracy +0.0110 (+0.0085 to +0.0135)"
    assert found() == ("holds so far", f"{one}, 1 of 3 starts")
    better = found(*runs("increasing", 0.02), *runs("decreasing", 0.015))
    assert better == ("holds", f"{one} to +0.0210 (+0.0185 to +0.0235)")
    assert found(*runs("increasing", -0.02))[0] == "does not hold"
    for shift in (-0.0015, -0.0005, 0.001):  # means of −0.0005, 0.0005 and 0.0020, with a half-width of 0.0025
        assert found(*runs("increasing", shift))[0] == "too close"


@pytest.mark.parametrize(("score", "said"), [(0.88, "does not hold"), (0.92, "holds so far")])
def test_one_seeds_samples_may_leave_it_open(record_of, table_of, score, said):
    few = [record_of(), learned(record_of, "uniform", (1, 2, 3), scores=(0.5, score, 0.8))]
    assert judged(table_of, "at-least-gelu", few)["mlp-adult"][0] == "too close"
    for run in few:
        run.data["eval_samples"] = 100_000
    assert judged(table_of, "at-least-gelu", few)["mlp-adult"][0] == said


def test_a_swap_is_free_up_to_a_thousandth_or_one_sample(record_of, table_of):
    def verdict(*runs):
        return judged(table_of, "swap", runs)["mlp-adult"][0]

    runs = [record_of(), hardened(record_of, relu=0.8495)]
    assert judged(table_of, "swap", runs)["mlp-adult"][1] == "accuracy: hardened −0.0005; GELU −0.1500"
    assert verdict(*runs) == "holds"
    assert verdict(hardened(record_of, relu=0.83)) == "holds", "one of 50 samples"
    assert verdict(hardened(record_of, relu=0.82)) == "does not hold"
    seeds = [hardened(record_of, relu=0.85 + change, seed=seed) for seed, change in enumerate((0.05, -0.05, 0.0))]
    assert verdict(*seeds) == "does not hold", "a mean of zero hides two seeds that changed"
    swapped = judged(table_of, "swap", [*seeds, *(record_of(seed=seed) for seed in range(2))])["mlp-adult"][1]
    assert swapped == "accuracy: hardened 0.0000, worst seed +0.0500; GELU −0.1500, worst seed −0.1500"
    many = hardened(record_of, relu=0.848)
    many.data["eval_samples"] = 10_000
    assert verdict(many) == "does not hold"


def test_a_benchmark_of_our_own_is_no_judge_of_the_paper(record_of, table_of):
    runs = [record_of(benchmark="mlp-digits"), hardened(record_of, benchmark="mlp-digits")]
    assert table_of("claims", runs).rows == []
    assert not [text for text in table_of("results", runs, paper=read_paper_values()).header if "Paper" in text]


def test_a_pretrained_gpt2_can_be_swapped_if_it_is_hard(record_of, table_of):
    fields = {"metric": "perplexity", "greater_is_better": False, "benchmark": "gpt2-wikitext2"}

    def verdict(relu, gelu=None, pretrained="gpt2"):
        runs = [hardened(record_of, relu=relu, scores=(200.0, 150.0, 100.0), **fields)]
        if gelu is not None:
            runs.append(record_of(scores=(1.0, 1.0, 100.0), relu_scores=(1.0, 1.0, gelu), **fields))
        for run in runs:
            run.config["pretrained"] = pretrained
        return judged(table_of, "gpt2", runs)["gpt2-wikitext2"]

    assert verdict(100.01) == ("does not hold", "perplexity: hardened +0.01 %")
    assert verdict(200.0)[0] == "holds"
    assert verdict(100.01, gelu=100.02)[0] == "too close", "GELU's swap is free too"
    text = "perplexity: hardened +0.01 %, of a network from scratch"
    assert verdict(100.01, pretrained=None) == ("not comparable", text)


def test_t_and_c_are_judged_pair_by_pair(record_of, table_of):
    def point(t, c, drift):
        path = [{"a": 1.0}, {"a": 1.0}, {"a": 1.0 + drift}]
        name = f"grid/{t}-{c}"
        run = record_of(activation="lambda_gelu", hardness=path, benchmark="mlp-fmnist", name=name)
        run.config.update(temperature=t, hardness_lr_multiplier=c)
        return run

    runs = [point(0.1, 1.0, 1.0), point(0.1, 9.0, 3.0), point(0.3, 1.0, 0.5), point(0.3, 9.0, 2.0)]
    verdict, number = judged(table_of, "grid", runs)["mlp-fmnist"]
    assert (verdict, number) == ("holds", "4 of 4 pairs of settings; largest drift at t = 0.1, c = 9")
    runs[-1] = point(0.3, 9.0, 4.0)
    assert judged(table_of, "grid", runs)["mlp-fmnist"][1].startswith("3 of 4 pairs")


def test_the_papers_drift_is_put_over_ours(record_of, table_of):
    modes = ("uniform", "increasing", "decreasing")
    paper = PaperValues({"mlp-adult": {f"lambda_gelu-{mode}": {"drift": (3.0, None)} for mode in modes}})
    path = [{"a": 1.25}] * 49 + [{"a": 2.5}]  # the first epoch's move, from 1.0 before training, is none of it

    def run(mode, path):
        length = {"scores": (0.5,) * len(path), "relu_scores": (0.5,) * len(path), "hardness": path}
        made = record_of(activation="lambda_gelu", init_mode=mode, initial_hardness={"a": 1.0}, **length)
        made.data.update(train_samples=32_561, eval_samples=16_281)
        return made

    def found(*runs):
        return judged(table_of, "drift", runs, paper=paper)["mlp-adult"]

    verdict, number = found(*(run(mode, path) for mode in modes))
    assert (verdict, number) == ("does not hold", "2.4 times ours")
    assert found(run("uniform", path)) == (verdict, f"{number}, 1 of 3 starts"), "one start is enough to fail"
    near = [{"a": 1.25}] * 49 + [{"a": 4.0}]
    assert found(run("uniform", near))[0] == "holds so far"
    assert found(*(run(mode, near[-3:]) for mode in modes)) == ("not comparable", "1.1 times ours")


def test_ways_are_told_apart_seed_by_seed(record_of, measurement_of, table_of):
    gelu, relu, hard = (0.80, 0.81, 0.82), (0.85, 0.87, 0.86), (0.83, 0.86, 0.84)
    runs = []
    for seed in range(3):
        runs.append(record_of(seed=seed, scores=(0.5, 0.9, gelu[seed]), relu_scores=(0.5, 0.5, 0.5 + 0.1 * seed)))
        runs.append(record_of(seed=seed, activation="relu", scores=(0.5, 0.9, relu[seed]), relu_scores=(None,) * 3))
        runs.append(hardened(record_of, seed=seed, relu=hard[seed]))
    runs.append(learned(record_of, "uniform", (1, 2, 3), seed=42, scores=(0.5, 0.9, 0.99)))
    found = {row[1]: row for row in table_of("differences", runs, [converted(measurement_of, 0.8125, 0.85)]).rows}
    row = found["λ-GELU hardened, swapped"]
    # 0.03, 0.05, 0.02 and −0.02, −0.01, −0.02: t of two degrees of freedom is 4.3027
    assert row[2:4] == ["+0.0333 (−0.0046 to +0.0713)", "−0.0167 (−0.0310 to −0.0023)"]
    assert row[4] == "–", "nothing was swapped early"
    assert found["Converted, no training"][2] == "−0.0375", "of how many rows is not known"
    assert found["ReLU from the start"][3] == "–", "itself"
    assert found["λ-GELU uniform, smooth"][2:6] == ["–", "–", "–", "1 of 3: 42"], "no other run has its seed"


def test_losses_of_one_seed_are_compared_row_by_row_with_the_network_swapped_early(table_of, record_of, relufied):
    name = "pretrained/reactions/{}"
    hard = record_of(benchmark="reactions", name=name.format("a"), activation="lambda_gelu", harden=True)
    early = relufied(benchmark="reactions", name=name.format("b"))
    rows = {"relu_loss": [1.0, 3.0, 2.0], "loss": [9.0, 9.0, 9.0]}, {"loss": [1.5, 2.0, 2.5]}
    records = [
        dataclasses.replace(
            record, rows=losses, config=record.config | {"hardening_schedule": "linear", "max_steps": 7}
        )
        for record, losses in zip((hard, early), rows, strict=True)
    ]
    found = {row[1]: row[2:] for row in table_of("pretrained", records).rows}
    differences = [-0.5, 1.0, -0.5]
    half = 4.302652729911275 * statistics.stdev(differences) / math.sqrt(3)  # t of two degrees of freedom
    _, loss, difference, steps, *_ = found["hardened (linear), swapped"]
    assert (loss, steps) == ("2.000", "7")
    assert difference == f"0.000 (−{half:.3f} to +{half:.3f})"
    assert found["ReLU swapped in at 25 %"][1:3] == ["2.000", "–"]
