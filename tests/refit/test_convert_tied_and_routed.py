"""Networks in which no map after some gates can be refitted (tied decoders, experts), and what else can be done."""

import pytest
import torch
from loud_nets import VOCABULARY, loud, tokens
from small_networks import convert_with
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel, MixtralConfig, MixtralForCausalLM

BERT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 16}
EXPERTS = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2, "max_position_embeddings": 16,
}  # fmt: skip


class Routed(nn.Module):
    """Three experts; a batch runs those that its rows choose, found by the values or by their number."""

    def __init__(self, by):
        super().__init__()
        torch.manual_seed(0)
        self.by = by
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x):
        chosen, out = (1000 * x[:, 0]).long().abs() % 3, x.new_zeros(len(x), 6)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows) if self.by == "number" else (chosen == number).any():
                out = out.index_add(0, rows, expert(x[rows]))
        return {"values": self.head(out)}


@pytest.mark.parametrize("by", ["number", "values"])
def test_batches_that_run_other_experts_are_all_fitted(by):
    """In batches of two rows, each runs one or two of three experts; in one of 64, all run."""
    rows = torch.randn(120, 4, generator=torch.Generator().manual_seed(1))
    small, large = (convert_with(Routed(by), rows, batch_size=size, max_kl=None) for size in (2, 64))
    counts = [{layer.layers: layer.rows for layer in report.layers} for _, report in (small, large)]
    assert counts[0] == counts[1]
    assert sum(counts[0][f"experts.{number}.2",] for number in range(3)) == counts[0]["head.2",]
    for name, value in small.model.state_dict().items():
        torch.testing.assert_close(value, large.model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_a_tied_decoder_leaves_its_gate_without_a_refit_and_its_block_as_wide(tmp_path):
    model = loud(BertForMaskedLM(BertConfig(**BERT, intermediate_size=24, num_hidden_layers=1)))
    model.tie_weights()
    converted, report = convert_with(model, tokens(), width=1.5, max_kl=None)
    assert len(report.gates) == 2
    unfit = [layer for layer in report.layers if layer.is_unfit]
    assert [layer.sites for layer in unfit] == [("cls.predictions.transform.transform_act_fn",)]
    assert any("transform_act_fn: only the gate was exchanged" in warning for warning in report.warnings)
    (head,) = (layer for layer in report.layers if layer.choice == "bias only")  # the bias is the decoder's own
    assert (head.layers, head.sites) == (("bert.embeddings.word_embeddings",), ())
    assert head.error_after < head.error_before
    embeddings = [each.get_input_embeddings().weight for each in (model, converted)]
    assert torch.equal(*embeddings)
    assert converted.cls.predictions.decoder.weight is embeddings[1]
    assert report.held_out.refitted.kl < report.held_out.direct.kl
    assert report.width_share == 1.5
    assert converted.config.intermediate_size == 36
    converted.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**tokens(4)).logits, converted(**tokens(4)).logits)


def test_an_encoder_without_the_pooler_that_its_config_builds_is_widened():
    model = loud(BertModel(BertConfig(**BERT, intermediate_size=24, num_hidden_layers=1), add_pooling_layer=False))
    converted, report = convert_with(model, tokens(), width=1.5, max_kl=None)
    assert report.width_share == 1.5
    assert converted.config.intermediate_size == 36
    assert converted.encoder.layer[0].output.dense.in_features == 36


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="torch 2.8 runs no such experts on a CPU")
@pytest.mark.parametrize(
    "build",
    [
        lambda: MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=3)),
        lambda: MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=3, experts_implementation="batched_mm")),
    ],
    ids=["mixtral", "mixtral-batched"],
)
def test_gates_of_stacked_experts_are_exchanged_alone_and_measured(build, tmp_path):
    model = loud(build(), 1.5)
    converted, report = convert_with(model, tokens(24, 6), max_kl=None)
    assert {site for layer in report.layers if layer.is_unfit for site in layer.sites} == set(report.gates)
    assert 0 < report.held_out.refitted.kl < report.held_out.direct.kl  # the head reads what the experts write
    assert any("only the gate was exchanged" in warning for warning in report.warnings)
    assert converted.config.hidden_act == "relu"
    converted.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = type(model).from_pretrained(tmp_path).eval()(**tokens(4)).logits
        torch.testing.assert_close(loaded, converted(**tokens(4)).logits)
        assert (loaded - model(**tokens(4)).logits).abs().max() > 1e-3
