"""Word errors of speech against a plain recursion."""

import pytest
import torch
from lgelu_lab.benchmarks.real_inputs import UNITS, joined
from lgelu_lab.measurements import real_tasks
from lgelu_lab.measurements.real_tasks import TASKS
from tiny_speech import SAID, a_speaker, sound


def errors(spoken, heard):
    """The least number of words to change, put in or leave out."""
    if not spoken or not heard:
        return len(spoken) + len(heard)
    return min(
        errors(spoken[1:], heard[1:]) + (spoken[0] != heard[0]), errors(spoken[1:], heard) + 1,
        errors(spoken, heard[1:]) + 1,
    )  # fmt: skip


def test_word_errors_are_those_of_a_plain_recursion_over_all_sounds(monkeypatch):
    model, processor = a_speaker()
    units = UNITS["speech"]([sound(0.2), sound(0.4), sound(0.6)], SAID, processor, 24)
    heard = {SAID[0]: "The cat, on a mat!", SAID[1]: "one big house", SAID[2]: SAID[2]}
    monkeypatch.setattr(
        real_tasks, "written", lambda network, batch, tokenizer: [heard[text] for text in spoken(batch, tokenizer)]
    )

    def spoken(batch, tokenizer):
        return [tokenizer.decode(row[row >= 0], skip_special_tokens=True) for row in batch["labels"]]

    wrong = [errors(SAID[0].split(), ["the", "cat", "on", "a", "mat"]), errors(["a", "house"], ["1", "big", "house"])]
    assert wrong == [1, 2]
    found = TASKS["speech"].judge(model, model, [joined(units[:2], 0), units[2]], processor)
    assert found["score"] == pytest.approx(sum(wrong) / len(" ".join(SAID).split()), rel=1e-12)
    assert found["kl"] == pytest.approx(0, abs=1e-9)
    assert TASKS["speech"].judge(model, torch.nn.ModuleList([model])[0], [units[0]], processor)["agreement"] == 1
