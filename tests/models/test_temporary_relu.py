"""ReLU for the length of a block, and the model as it was after it."""

import pytest
import torch
from families import BY_NAME
from torch import nn

from hf_lgelu import LambdaGELU, find_smooth_calls, temporary_relu

BERT = BY_NAME["bert"]


def state(model):
    modules = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    tensors = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    return modules, tensors, modes, model.config.to_dict()


def assert_same(model, before):
    after = state(model)
    assert (after[0], after[2], after[3]) == (before[0], before[2], before[3])
    assert after[1].keys() == before[1].keys()
    assert all(after[1][n][0] == before[1][n][0] and torch.equal(after[1][n][1], before[1][n][1]) for n in after[1])


@pytest.mark.parametrize("training", [True, False])
def test_inside_is_relu_and_outside_is_what_was_there(training):
    model = BERT.build("lambda_gelu").train(training)
    before = state(model)
    with temporary_relu(model) as report:
        assert len(report) == 3
        assert report.config_changes == ()
        assert [type(model.get_submodule(site.name)) for site in report.sites] == [nn.ReLU] * 3
        assert model.get_submodule(report.sites[0].name).training is training
        assert find_smooth_calls(model, BERT.inputs()) == []
    assert_same(model, before)
    assert len(find_smooth_calls(model, BERT.inputs())) == 3


def test_an_error_inside_gets_out_and_the_model_is_as_it_was():
    model = BERT.build("lambda_gelu")
    before = state(model)
    with pytest.raises(KeyboardInterrupt), temporary_relu(model):
        raise KeyboardInterrupt
    assert_same(model, before)


def test_nested_blocks_each_give_back_what_they_took():
    model = nn.Sequential(LambdaGELU(), nn.GELU(), nn.SiLU())
    original = list(model)
    with temporary_relu(model):
        outer = list(model)
        assert [type(m) for m in outer] == [nn.ReLU, nn.GELU, nn.SiLU]
        with temporary_relu(model, kinds=("gelu", "silu")):
            assert [type(m) for m in model] == [nn.ReLU] * 3
        assert all(now is then for now, then in zip(model, outer, strict=True))
    assert all(now is then for now, then in zip(model, original, strict=True))


def test_a_block_inside_a_full_one_has_nothing_to_do_and_says_so():
    model = BERT.build("lambda_gelu")
    before = state(model)
    with pytest.raises(ValueError, match="no activation module"), temporary_relu(model), temporary_relu(model):
        pytest.fail("unreachable")
    assert_same(model, before)


def test_one_module_at_several_places_is_put_back_at_each():
    gelu = nn.GELU()
    model = nn.Sequential(gelu, nn.Linear(2, 2), gelu)
    with temporary_relu(model, kinds=("gelu",)):
        assert [type(m) for m in model] == [nn.ReLU, nn.Linear, nn.ReLU]
    assert model[0] is gelu
    assert model[2] is gelu


def test_what_is_computed_inside_is_relu_of_the_same_weights():
    model = nn.Sequential(nn.Linear(4, 8), LambdaGELU(), nn.Linear(8, 2))
    x = torch.randn(5, 4)
    expected = torch.clamp(x @ model[0].weight.T + model[0].bias, min=0) @ model[2].weight.T + model[2].bias
    with temporary_relu(model):
        inside = model(x)
    torch.testing.assert_close(inside, expected)
    assert not torch.allclose(model(x), expected, atol=1e-3)
