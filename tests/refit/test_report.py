"""The report's tables: cells read back from them are the numbers that went in, and nothing is left out."""

import json
from dataclasses import replace

import torch
from report_by_hand import HELD_OUT, REPORT, distance
from small_networks import convert_with
from torch import nn
from torch.utils.data import TensorDataset, default_collate


class Joint(nn.Module):
    """Two maps that feed one sum and are solved together, and a gate that gives what the network gives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.up, self.act = nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU()
        self.down, self.skip, self.last = nn.Linear(16, 3), nn.Linear(16, 3), nn.SiLU()

    def forward(self, x):
        x = self.gate(self.first(x))
        return self.last(self.down(self.act(self.up(x))) + self.skip(x))


def test_maps_are_counted_and_no_gates():
    report = convert_with(Joint().eval(), torch.randn(200, 4)).report
    assert {layer.layers for layer in report.layers} == {("up",), ("down", "skip"), ("last",)}
    assert "linear maps: 3 refitted\n" in str(report)
    assert "last: only the gate was exchanged" in str(report)


def test_calls_are_no_modules_to_put_gates_at():
    def said(*gates):
        return str(replace(REPORT, gates=dict.fromkeys(gates, "gelu"), config_changes=()))

    assert "at each name in `report.gates` (`network" in said("act", "recalled")
    assert "`network.set_submodule(name, gate)`, of a function `setattr`" in said("act")
    assert "at each name in `report.gates` but those of calls (`called`)" in said("act", "up.called.0")
    assert "`report.gates`" not in said("called.0")


def test_the_report_names_the_next_rung():
    held_out = replace(HELD_OUT, refitted=distance(None, None, 9.0, 0.7))
    assert "The next rung, `effort` 'place'" in str(replace(REPORT, held_out=held_out, next_step="place"))
    assert "The next rung" not in str(replace(REPORT, held_out=held_out, next_step=None))


def test_the_report_has_the_options_as_plain_values():
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    report = convert_with(
        net, TensorDataset(torch.randn(200, 4)), keep=["1"], data_collator=default_collate, max_samples=150
    ).report
    told = json.loads(json.dumps(report.as_dict()))["config"]
    assert (told["keep"], told["max_samples"], told["width"], told["effort"]) == (["1"], 150, 1.0, None)
    assert told["data_collator"] == "default_collate"
