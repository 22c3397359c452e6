"""A run of one's own beside committed ones, by numbers small enough to check by hand."""

import pytest
from lgelu_lab.report.own_run import compare_run


@pytest.fixture
def committed(record_of):
    scores = ((0.5, 0.6, last) for last in (0.70, 0.72, 0.74))
    return [record_of(seed=seed, scores=of, name=f"mlp-adult/gelu-seed{seed}") for seed, of in enumerate(scores)]


def rows(text):
    """{quantity: what stands behind it} of the table."""
    lines = text[text.index("this run") :].splitlines()[1:]
    return {line[:34].strip(): line[34:].split() for line in lines if line.startswith("  ")}


def test_scores_stand_against_the_spread_of_the_seeds(record_of, committed):
    near, far = (compare_run(record_of(seed=7, scores=(0.5, 0.6, score)), committed) for score in (0.75, 0.9))
    assert "Settings that differ:\n  none" in near
    assert rows(near)["last score"][:5] == ["0.7500", "0.7200", "±", "0.0200", "+0.0300"]
    assert near.count("1.5 deviations of 3 seeds: as another seed may be") == 2  # best and last
    assert far.count("9.0 deviations of 3 seeds: more than another seed") == 2
    assert "mlp-adult/gelu-seed0, mlp-adult/gelu-seed1, mlp-adult/gelu-seed2" in far


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
    with pytest.raises(ValueError, match="no committed record of mlp-adult is of relu; there is gelu"):
        compare_run(record_of(activation="relu"), committed)
