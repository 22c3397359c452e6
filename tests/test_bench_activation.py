"""scripts/bench_activation.py: its arithmetic against numbers by hand, its files, and what it refuses."""

import csv
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import hf_lgelu

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_activation  # noqa: E402
from activation_bench import cases, memory, operation, providers, results, table, timing, training_steps  # noqa: E402

PROVENANCE = results.Provenance("abacus", "1", "", "2", "3", "abc")
PACE = operation.Pace(rounds=2, seconds=0.0)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def measure(path, *, names=("relu",), hardness=(2.0,), modes=("forward", "both"), size="64", provenance=PROVENANCE):
    case = cases.Case(cases.parse_size(size), "float32", 1, "cpu")
    file = results.ResultsFile(path, provenance)
    chosen = providers.check_providers(list(names))
    return list(operation.measure_operation(case, chosen, list(hardness), list(modes), "stock", PACE, file))


def row_of(**cells):
    """A measured row as the file has it, every cell a text."""
    filled = {
        "provider": "relu", "kernel": "torch", "mode": "both", "size": "256x256", "memory_format": "contiguous",
        "elements": "65536", "dtype": "float32", "hardness": "", "threads": "1", "allocator": "keep",
        "clock": "thread_time", "milliseconds_q20": "1", "milliseconds_median": "2", "milliseconds_q80": "3",
        "ratio_q20": "0.9", "ratio_median": "1", "ratio_q80": "1.1", "device": "abacus",
    }  # fmt: skip
    return dict.fromkeys(results.COLUMNS, "") | filled | cells


# Timing


def test_each_round_begins_with_another_call_and_warms_each_just_before_its_timed_call():
    seen = []
    names = ("a", "b", "c")
    calls = {name: (lambda name=name: seen.append(name)) for name in names}

    def clock(call, repetitions):
        seen.append(f"{len(seen)}")  # a mark, replaced below
        seen[-1] = "timed"
        call()
        return 1e-2

    times = timing.interleave(calls, clock, rounds=4, budget_seconds=60.0)
    order = "abc bca cab abc".replace(" ", "")
    assert seen[-len(order) * 3 :] == [word for name in order for word in (name, "timed", name)]
    assert {name: entry.repetitions for name, entry in times.items()} == dict.fromkeys(names, 1)
    assert {len(entry.seconds) for entry in times.values()} == {4}


def test_a_long_call_gets_no_warm_up_of_its_own():
    counts = {"long": 0, "short": 0}
    durations = {"long": timing.LONG_SECONDS, "short": timing.LONG_SECONDS / 2}

    def clock(call, repetitions):
        return durations[call()]

    def call_of(name):
        def call():
            counts[name] += 1
            return name

        return call

    calls = {name: call_of(name) for name in counts}
    timing.interleave(calls, clock, rounds=0, budget_seconds=0.0)
    before = dict(counts)
    timing.interleave(calls, clock, rounds=7, budget_seconds=60.0)
    assert {name: counts[name] - 2 * before[name] for name in counts} == {"long": 7, "short": 14}


def test_a_short_call_is_repeated_until_the_stretch_is_long_enough():
    times = timing.interleave({"a": lambda: None}, lambda call, n: 1e-5, rounds=1, budget_seconds=1.0)
    assert times["a"].repetitions == 200  # 2 ms of 10 µs each


def test_the_budget_ends_the_rounds_but_never_before_the_fifth():
    calls = {"a": lambda: None}
    spent = timing.interleave(calls, lambda call, n: 1.0, rounds=50, budget_seconds=0.0)
    assert len(spent["a"].seconds) == 5
    assert len(timing.interleave(calls, lambda call, n: 1.0, rounds=3, budget_seconds=0.0)["a"].seconds) == 3


def test_ratios_are_taken_within_a_round():
    times = {
        "gelu": timing.Times((1.0, 2.0, 4.0), 1),
        "other": timing.Times((3.0, 1.0, 4.0), 7),
    }
    summary = timing.summarize(times, "gelu")["other"]
    # Rounds give 3, 0.5 and 1; sorted 0.5, 1, 3. A fifth of the way from first to last lies at 0.4 of the first gap.
    assert summary.ratios == pytest.approx((0.5 + 0.4 * 0.5, 1.0, 1.0 + 0.6 * 2.0))
    assert summary.seconds == pytest.approx((1.0 + 0.4 * 2.0, 3.0, 3.0 + 0.6 * 1.0))
    assert (summary.rounds, summary.repetitions) == (3, 7)
    assert timing.summarize(times, "gelu")["gelu"].ratios == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", ["thread_time", "perf_counter"])
def test_the_clocks_give_seconds_of_one_call(name):
    # Busy for 20 ms by the same kind of clock; a mean over 3 calls, not their sum.
    now = getattr(timing.time, name)

    def busy():
        end = now() + 0.02
        while now() < end:
            pass

    assert timing.CLOCKS[name](busy, 3) == pytest.approx(0.02, rel=0.25)


def test_clock_for_one_thread_several_and_a_gpu():
    kinds = [timing.clock_name(*what) for what in (("cpu", 1), ("cpu", 2), ("cuda", 1))]
    assert kinds == ["thread_time", "perf_counter", "cuda_event"]


# Memory


@pytest.mark.parametrize(
    ("module", "bytes_per_element"),
    [
        (nn.ReLU(), 4),  # its output
        (nn.GELU(), 4),  # x
        (nn.Sequential(nn.GELU(), nn.ReLU()), 8),  # x and the output
        (nn.Sequential(nn.ReLU(), nn.GELU()), 4),  # ReLU's output is GELU's x: one storage
    ],
    ids=["relu", "gelu", "gelu-relu", "relu-gelu"],
)
def test_saved_bytes_of_known_operations(module, bytes_per_element):
    x = torch.randn(1000, requires_grad=True)
    assert memory.saved_bytes(lambda: module(x)) == 1000 * bytes_per_element


def test_peak_counts_what_is_held_at_one_time():
    def call():
        first = torch.ones(1000)  # 4000 bytes
        second = torch.ones(500)  # and 2000
        del first
        third = torch.ones(250)  # 2000 + 1000 are held now, less than before
        return second.numel() + third.numel()

    assert memory.peak_bytes(call, "cpu") == 6000


def test_resident_bytes_count_a_shared_storage_once():
    base = torch.zeros(100)
    assert memory.resident_bytes([base, base.view(10, 10), base[5:], torch.zeros(3)]) == 412


# Cases and providers


def test_sizes():
    assert cases.parse_size("256x256") == cases.Size((256, 256), "contiguous")
    channels_last = cases.parse_size("2x3x4x5:channels_last")
    assert channels_last == cases.Size((2, 3, 4, 5), "channels_last")
    assert (channels_last.name, channels_last.elements) == ("2x3x4x5", 120)
    x = cases.Case(channels_last, "bfloat16", 1, "cpu").new_input(0)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    assert x.dtype == torch.bfloat16


@pytest.mark.parametrize("text", ["", "x", "0x4", "-1", "4x", "2^12", "256x256:nhwc", "256x256:channels_last"])
def test_a_wrong_size_says_what_is_accepted(text):
    with pytest.raises(ValueError, match=r"e\.g\. 256x256|one of contiguous, channels_last|takes four numbers"):
        cases.parse_size(text)


def test_the_reference_is_always_measured_and_first():
    assert [provider.name for provider in providers.check_providers(["relu"])] == ["gelu", "relu"]
    assert [provider.name for provider in providers.check_providers([])] == list(providers.PROVIDERS)
    with pytest.raises(ValueError, match=r"unknown providers: gleu; accepted: gelu, lambda_gelu"):
        providers.check_providers(["gleu"])


EXPECTED = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "prelu": lambda x: torch.where(x > 0, x, 0.25 * x),
    "swish_beta": lambda x: x / (1 + torch.exp(-x)),
    "copy": lambda x: x,
}


@pytest.mark.parametrize("name", [n for n, p in providers.PROVIDERS.items() if not p.compiled and n != "xielu"])
def test_a_provider_computes_what_its_name_says(name):
    provider = providers.PROVIDERS[name]
    x = cases.Case(cases.parse_size("5x7"), "float32", 1, "cpu").new_input(0).requires_grad_()
    try:
        module = provider.build(x, 3.0)
    except RuntimeError as error:
        pytest.skip(str(error))
    expected = EXPECTED.get(name, lambda v: v * torch.special.ndtr(3.0 * v))(x.detach().double())
    assert torch.allclose(module(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_the_kernel_that_computes_it_is_named():
    x = torch.ones(4)
    taken = {}
    for name in ("relu", "lambda_gelu:eager", "lambda_gelu:aten", "gelu_compiled"):
        provider = providers.PROVIDERS[name]
        taken[name] = providers.kernel_taken(provider, provider.build(x, 2.0), x)
    assert taken == {
        **{"relu": "torch", "gelu_compiled": "inductor"},
        **{"lambda_gelu:eager": "eager", "lambda_gelu:aten": "aten"},
    }
    automatic = providers.PROVIDERS["lambda_gelu"]
    with hf_lgelu.use_kernel("eager"):
        assert providers.kernel_taken(automatic, automatic.build(x, 2.0), x) == "eager"


def test_a_frozen_hardness_learns_nothing_and_a_learning_one_does():
    x = torch.linspace(-1, 1, 9).requires_grad_()
    slopes = {}
    for name in ("lambda_gelu", "lambda_gelu_frozen"):
        module = providers.PROVIDERS[name].build(x, 2.0)
        assert module.hardness.item() == pytest.approx(2.0, rel=1e-6)
        slopes[name] = operation.mode_call(module, "both", x, torch.ones(9))()[1].item()
    assert slopes["lambda_gelu"] > 0
    assert slopes["lambda_gelu_frozen"] == 0


def test_modes_give_the_gradients_of_x_and_of_the_parameters():
    x = torch.tensor([-2.0, 3.0], requires_grad=True)
    delta = torch.tensor([5.0, 7.0])
    module = nn.PReLU()  # slope 0.25; its gradient is the sum of δ·x where x < 0
    for mode in ("backward", "both"):
        call = operation.mode_call(module, mode, x, delta)
        for _ in range(2):  # the graph is kept
            dx, slope = call()
            assert dx.tolist() == [1.25, 7.0]
            assert slope.item() == -10.0
    assert operation.mode_call(module, "forward", x, delta)().tolist() == [-0.5, 3.0]
    copied = operation.mode_call(providers.Copy(), "both", x, delta)()
    assert [tensor.tolist() for tensor in copied] == [[-2.0, 3.0], [3.0, 10.0]]


# Rows and files


def test_rows_have_all_columns_and_a_rerun_measures_nothing(tmp_path):
    path = tmp_path / "a" / "bench.csv"
    rows = measure(path)
    assert [(row.provider, row.mode) for row in rows] == [
        *(("gelu", "forward"), ("relu", "forward"), ("gelu", "both"), ("relu", "both"))
    ]
    with path.open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == results.COLUMNS
    assert len(written) == 4
    relu = written[3]
    assert (relu["size"], relu["elements"], relu["device"], relu["commit"], relu["rounds"]) == (
        "64",
        "64",
        "abacus",
        "abc",
        "2",
    )
    assert (relu["saved_bytes_per_element"], relu["peak_bytes"], relu["peak_ratio"]) == ("4", "512", "1")
    moved = 5 * 64 * 4
    assert float(relu["gigabytes_per_second"]) == pytest.approx(
        moved / float(relu["milliseconds_median"]) / 1e6, rel=1e-4
    )
    assert [cells["ratio_median"] for cells in written if cells["provider"] == "gelu"] == ["1", "1"]
    assert measure(path) == []
    assert path.read_text(encoding="utf-8").count("\n") == 5


def test_a_rerun_adds_what_is_missing(tmp_path):
    path = tmp_path / "bench.csv"
    measure(path, modes=("forward",))
    more = measure(path, names=("relu", "lambda_gelu:eager"), hardness=(1.0, 20.0), modes=("forward",))
    assert [(row.provider, row.hardness, row.kernel) for row in more] == [
        *(("lambda_gelu:eager", "1", "eager"), ("lambda_gelu:eager", "20", "eager"))
    ]
    other = results.Provenance("abacus", "1", "", "2", "3", "def")
    assert len(measure(path, modes=("forward",), provenance=other)) == 2  # of another commit


def test_what_cannot_run_is_left_out_with_a_line_that_says_why(tmp_path, monkeypatch, capsys):
    def unavailable(x, hardness):
        raise ImportError("no such package\nand more")

    broken = providers.Provider("relu", "ReLU", unavailable)
    monkeypatch.setitem(providers.PROVIDERS, "relu", broken)
    rows = measure(tmp_path / "bench.csv")
    assert [row.provider for row in rows] == ["gelu", "gelu"]
    assert capsys.readouterr().out == "relu is left out: no such package\n"


def test_a_row_is_held_once_it_is_written(tmp_path):
    file = results.ResultsFile(tmp_path / "bench.csv", PROVENANCE)
    cells = row_of()
    row = results.Row(**{name: value for name, value in cells.items() if name in results.Row.__annotations__})
    assert row not in file
    file.append(row)
    assert row in file
    assert replace(row, ratio_median="7") in file  # numbers are no part of what was measured
    assert replace(row, hardness="2") not in file


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "bench.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        results.ResultsFile(path, PROVENANCE)
    path.write_text(",".join(results.COLUMNS) + "\nrelu,torch\n")
    with pytest.raises(ValueError, match="cut off"):
        results.ResultsFile(path, PROVENANCE)


def test_the_latest_row_of_a_case_counts(tmp_path):
    path = tmp_path / "bench.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, results.COLUMNS)
        writer.writeheader()
        writer.writerows([row_of(commit="old", ratio_median="5"), row_of(commit="new"), row_of(threads="2")])
    assert [(row["commit"], row["threads"]) for row in results.latest_rows(path)] == [("new", "1"), ("", "2")]


def test_provenance_names_the_software():
    found = results.find_provenance("cpu")
    assert found.torch == torch.__version__.partition("+")[0]
    assert found.device
    assert found.commit
    assert found.hf_lgelu


# What is shown


def test_table_has_providers_down_and_sizes_across():
    rows = [
        row_of(provider="gelu", saved_bytes_per_element="4"),
        row_of(provider="gelu", size="32x64x32x32", memory_format="channels_last"),
        row_of(provider="lambda_gelu", kernel="cpu", hardness="2", ratio_median="0.456"),
        row_of(provider="lambda_gelu", kernel="cpu", hardness="20", ratio_median="0.7"),
        row_of(provider="lambda_gelu", kernel="cpu", hardness="2", size="4096", ratio_median="9"),
        row_of(provider="relu", mode="forward"),
    ]
    text = table.markdown_tables(rows, ["both"], ["float32"], [2.0])
    lines = text.splitlines()
    assert lines[0] == "**Forward and backward, float32, 1 thread, allocator keep**"
    assert lines[4:] == [
        "| Provider | 32x64x32x32:channels_last | 256x256 | Saved bytes per element |",
        "| --- | ---: | ---: | ---: |",
        "| GELU (erf) | 1.00 | 1.00 | 4.0 |",
        "| λ-GELU, kernel cpu (automatic), λ = 2 |  | 0.46 |  |",
    ]
    with pytest.raises(ValueError, match="no row"):
        table.markdown_tables(rows, ["backward"], ["float32"], [2.0])


def test_table_of_steps_gives_the_range_of_memory():
    peaks = {"mlp-4x256": "1", "gpt2-4x256": "0.7741", "resnet18-cifar": "0.9"}
    rows = [row_of(mode="step", size=size, memory_format="", peak_ratio=peak) for size, peak in peaks.items()]
    text = table.markdown_tables(rows, ["both"], ["float32"], [2.0])
    assert text.splitlines()[-1] == "| ReLU | 1.00 | 1.00 | 1.00 | 0.774 to 1.000 |"


def swept_rows():
    for provider, factor in (("copy", 0.2), ("gelu", 1.0), ("lambda_gelu", 0.5)):
        hardness = "2" if provider == "lambda_gelu" else ""
        for size in ("4096", "65536", "1048576", "256x256"):
            elements = int(numpy.prod([int(n) for n in size.split("x")]))
            times = {f"milliseconds_{q}": f"{factor * elements * 1e-6 * by:g}" for q, by in QUANTILES}
            ratios = {f"ratio_{q}": f"{factor * by:g}" for q, by in QUANTILES}
            yield row_of(provider=provider, size=size, elements=str(elements), hardness=hardness, **times, **ratios)


QUANTILES = (("q20", 0.9), ("median", 1.0), ("q80", 1.1))


def test_figure_shows_the_rows(tmp_path):
    figure = pytest.importorskip("activation_bench.figure")
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "bench.png"
    rows = list(swept_rows())
    chosen = figure.Selection("float32", 2.0, 1, "keep")
    figure.draw_figure(rows, path, chosen)
    pixels = numpy.asarray(image.open(path).convert("RGB"))
    for provider in ("lambda_gelu", "copy"):
        colour = figure.LOOKS[provider][0].lstrip("#")
        drawn = (pixels == [int(colour[i : i + 2], 16) for i in (0, 2, 4)]).all(axis=-1)
        # On the left its line, on the right its mark: both halves hold the colour.
        assert drawn[:, : drawn.shape[1] // 2].any()
        assert drawn[:, drawn.shape[1] // 2 :].any()
    with pytest.raises(ValueError, match="no row of mode 'both'"):
        figure.draw_figure(rows, path, figure.Selection("bfloat16", 2.0, 1, "keep"))
    with pytest.raises(ValueError, match="several devices"):
        figure.draw_figure([*rows, row_of(provider="gelu", device="other")], path, chosen)


# Training steps


@pytest.fixture(scope="module")
def small_model():
    model = training_steps.STEP_MODELS["mlp-4x256"]
    labels = torch.arange(8) % 10
    return training_steps.StepModel(
        "small", ("cpu",), model.build, lambda device: {"features": torch.ones(8, 784), "labels": labels},
        partial(torch.optim.SGD, momentum=0.9), 0.1,
    )  # fmt: skip


def test_steps_train_every_provider_and_are_measured_once(small_model, tmp_path):
    path = tmp_path / "bench.csv"
    file = results.ResultsFile(path, PROVENANCE)
    rows = list(training_steps.measure_steps(small_model, "float32", 1, "cpu", "stock", PACE, file))
    assert [row.provider for row in rows] == list(training_steps.ACTIVATIONS)
    assert [row.hardness for row in rows] == ["", "1.05", "159.577", "", ""]
    parameters = 785 * 256 + 3 * 257 * 256 + 257 * 10
    assert [int(row.elements) - parameters for row in rows] == [0, 4, 4, 0, 0]  # a λ at each of four sites
    # Weights and their gradients are held at once, whatever the activation.
    assert all(int(row.peak_bytes) > 2 * 4 * parameters for row in rows)
    assert float(rows[0].peak_ratio) == 1
    again = results.ResultsFile(path, PROVENANCE)
    assert list(training_steps.measure_steps(small_model, "float32", 1, "cpu", "stock", PACE, again)) == []


@pytest.mark.parametrize("provider", training_steps.ACTIVATIONS)
def test_a_step_moves_weights_and_only_a_learning_hardness(small_model, provider):
    training = training_steps.new_training(small_model, provider, small_model.new_batch("cpu"), "float32", "cpu")
    before = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    training.step()
    moved = {name for name, value in training.model.named_parameters() if not torch.equal(value, before[name])}
    learned = {name for name in before if name.endswith("raw_hardness")}
    assert before.keys() - learned == moved - learned
    assert len(learned) == (4 if provider.startswith("lambda_gelu") else 0)
    assert moved & learned == (learned if provider == "lambda_gelu" else set())
    # A frozen s reaches the optimizer without a gradient, so that no momentum is kept for it.
    held = {id(parameter) for parameter in training.optimizer.state}
    assert {name for name, value in training.model.named_parameters() if id(value) in held} == moved


def test_models_for_a_device_and_by_name():
    assert [row.name for row in training_steps.check_step_models([], "cpu")] == [
        *("mlp-4x256", "gpt2-4x256", "resnet18-cifar")
    ]
    assert [row.name for row in training_steps.check_step_models(["gpt2-small"], "cpu")] == ["gpt2-small"]
    with pytest.raises(ValueError, match=r"unknown models: bert; accepted: mlp-4x256"):
        training_steps.check_step_models(["bert"], "cpu")


# The command


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modes": ["sideways"]}, "--modes must be of forward, backward, both, got sideways"),
        ({"dtypes": ["float64"]}, "--dtypes must be of float32, bfloat16, float16, got float64"),
        ({"hardness": [0.5]}, "--hardness must be finite numbers of at least 1"),
        ({"threads": [0]}, "--threads and --rounds must be at least 1"),
        ({"providers": ["gleu"]}, "unknown providers: gleu"),
        ({"sizes": ["big"]}, "a size is positive numbers"),
        ({"models": ["bert"]}, "unknown models: bert"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_named(change, said):
    with pytest.raises(ValueError, match=said):
        bench_activation.check(bench_activation.BenchArguments(**change))


@pytest.mark.parametrize("allocator", bench_activation.ALLOCATORS)
def test_the_process_restarts_with_its_allocator_and_only_then(monkeypatch, allocator):
    started = []
    monkeypatch.setattr(bench_activation.os, "execve", lambda *what: started.append(what))
    monkeypatch.setattr(bench_activation.os, "environ", {"HOME": "/h", "MALLOC_MMAP_MAX_": "7"})
    bench_activation.restart_with(bench_activation.ALLOCATORS[allocator])
    ((program, words, environment),) = started
    assert (program, words[0]) == (sys.executable, sys.executable)
    assert environment == {"HOME": "/h"} | bench_activation.ALLOCATORS[allocator]
    monkeypatch.setattr(bench_activation.os, "environ", environment)
    bench_activation.restart_with(bench_activation.ALLOCATORS[allocator])
    assert len(started) == 1


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["bench_activation.py", *words])
    monkeypatch.setattr(bench_activation, "restart_with", lambda settings: None)
    bench_activation.main()


SMALL = ("--hardness", "2", "--sizes", "64", "--modes", "both", "--dtypes", "float32", "--threads", "1")


def test_the_command_measures_then_prints_a_table(tmp_path, monkeypatch, capsys):
    words = ("--csv", str(tmp_path / "bench.csv"), *SMALL)
    command(monkeypatch, *words, "--rounds", "1", "--providers", "relu", "lambda_gelu:eager")
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        f"both 64 contiguous float32 1 threads keep: {name}" for name in ("gelu", "lambda_gelu:eager λ=2", "relu")
    ]
    command(monkeypatch, *words, "--table")
    assert "| λ-GELU, kernel eager, λ = 2 |" in capsys.readouterr().out


def test_the_command_ends_with_one_line_for_what_it_cannot_do(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"^a size is positive numbers"):
        command(monkeypatch, "--sizes", "wide")
    with pytest.raises(SystemExit, match=r"No such file"):
        command(monkeypatch, "--csv", str(tmp_path / "none.csv"), "--table")


@pytest.mark.slow
def test_the_command_runs_with_both_allocators_in_one_file(tmp_path):
    path = tmp_path / "bench.csv"
    words = [sys.executable, str(SCRIPTS / "bench_activation.py"), "--csv", str(path), *SMALL, "--rounds", "1"]
    for allocator in bench_activation.ALLOCATORS:
        subprocess.run([*words, "--providers", "gelu", "--allocator", allocator], check=True, capture_output=True)
    assert [row["allocator"] for row in results.read_rows(path)] == list(bench_activation.ALLOCATORS)
