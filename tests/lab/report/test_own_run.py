"""One's own run next to committed runs, by numbers that are small enough to check by hand."""

import pytest
from lgelu_lab.report.own_run import compare_run


@pytest.fixture
def committed(record_of):
    scores = ((0.5, 0.6, last) for last in (0.70, 0.72, 0.74))
    return [record_of(seed=seed, scores=of, name=f"mlp-adult/gelu-seed{seed}") for seed, of in enumerate(scores)]


def test_scores_stand_against_those_of_the_seeds(record_of, committed):
    text = compare_run(record_of(seed=7, scores=(0.5, 0.6, 0.75)), committed)
    beside, *lines = text.splitlines()
    assert beside.endswith("beside mlp-adult/gelu-seed0, mlp-adult/gelu-seed1, mlp-adult/gelu-seed2")
    assert lines[:2] == [f"{which} score: 0.7500, committed 0.7200 ± 0.0200" for which in ("best", "last")]
    assert "committed" in lines[-1]


def test_settings_that_differ_are_named_and_the_nearest_group_is_taken(record_of, committed):
    others = [record_of(seed=seed, name=f"grid/gelu-seed{seed}") for seed in range(3)]
    for record in others:
        record.config["learning_rate"] = 0.5
    run = record_of(seed=7)
    run.config.update(learning_rate=0.5, weight_decay=0.25)
    text = compare_run(run, [*committed, *others])
    assert "grid/gelu-seed0" in text.splitlines()[0]
    assert "weight_decay: 0.25, committed " in text
    assert "learning_rate" not in text


def test_a_configuration_that_nobody_committed_is_refused(record_of, committed):
    with pytest.raises(ValueError, match="no committed record of mlp-adult is of relu"):
        compare_run(record_of(activation="relu"), committed)
