"""Numbers in words."""

from hf_lgelu.formats import percent


def test_nearly_all_predictions_are_not_all():
    assert percent(1.0) == "100 %"
    assert percent(1 - 1e-9) == "99.99 %"
    assert percent(0.123456) == "12.35 %"
