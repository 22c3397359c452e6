"""Steps of Adam that two processes take together: the same bits on both, and those of one process but for rounding."""

import efforts_run
import pytest
import torch
from convert_run import WAYS
from refit_nets import BY_NAME


@pytest.fixture(scope="module")
def launched(two_processes):
    """What each of two processes found."""
    return [torch.load(two_processes / f"efforts-{process}.pt", weights_only=False) for process in range(2)]


def assert_moved_alike(given, expected, start):
    """Nearer to what one process has than a millionth of the way that it went; 1e-14 of it was seen."""
    moved = {name: (value - start[name]).norm() for name, value in expected.items()}
    assert all(way > 1e-3 for way in moved.values())
    for name, value in expected.items():
        assert (given[name] - value).norm() < 1e-6 * moved[name], name


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_shared_out_whole(launched, way):
    batches = efforts_run.planned(way, None).together
    first, second = (found["shares", way] for found in launched)
    assert [sorted(one + other) for one, other in zip(first, second, strict=True)] == [
        sorted(batch.numbers) for batch in batches
    ]
    assert any(len(one) != len(other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_distill_as_one_does(launched, way):
    one, other = (found["distilled", way] for found in launched)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert_moved_alike(one, efforts_run.distilled(way, None), efforts_run.networks()[1].state_dict())


def test_the_parts_of_a_loss_add_up_to_that_over_all_rows(launched):
    whole = [efforts_run.loss_part(None, False), efforts_run.loss_part(None, True), efforts_run.weightless_part(None)]
    for number, expected in enumerate(whole):
        assert sum(found["losses"][number] for found in launched) == pytest.approx(expected, rel=1e-6)
    assert launched[1]["losses"][2] == 0


def test_two_processes_move_a_block_as_one_does(launched):
    (one, errors, sums), (other, other_errors, other_sums) = (found["block"] for found in launched)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert errors == other_errors
    whole, whole_errors, whole_sums = efforts_run.block_moved(None)
    assert whole_errors[1] < whole_errors[0]  # it is kept, or there is nothing to compare
    assert errors == pytest.approx(whole_errors, rel=1e-6)
    block = [name for name in whole if name.startswith(("0.", "2."))]
    start = efforts_run.networks()[1].state_dict()
    assert_moved_alike({name: one[name] for name in block}, {name: whole[name] for name in block}, start)
    for given, same, expected in zip(sums, other_sums, whole_sums, strict=True):
        assert torch.equal(given, same)
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)


def test_two_processes_climb_the_whole_ladder(launched):
    (one, report), (other, other_report) = (found["converted"] for found in launched)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert report == other_report
    _, whole = efforts_run.converted(None)
    assert [step["effort"] for step in report["steps"]] == ["refit", "place", "blocks", "distill"]
    # The first two rungs are those of one process but for rounding (1e-14 was seen). Other rows are drawn for the
    # blocks: 5 % and 7 % were seen, and whether so little is kept may differ, too.
    for given, expected, tolerance in zip(report["steps"], whole["steps"], (1e-9, 1e-9, 0.15, 0.2), strict=True):
        assert given["distance"] == pytest.approx(expected["distance"], rel=tolerance)
    kept = [[step["is_kept"] for step in steps[:2]] for steps in (report["steps"], whole["steps"])]
    assert kept == [[True, False]] * 2
    assert BY_NAME["mlp"].model().state_dict().keys() == one.keys()
