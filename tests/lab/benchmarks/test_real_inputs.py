"""Sounds as units: what of them a network reads, and batches of them."""

import io

import pytest
import soundfile
import torch
from lgelu_lab.benchmarks.real_inputs import UNITS, joined
from lgelu_lab.measurements.conversion import change_of_outputs
from tiny_speech import SAID, a_speaker, sound, speech


def test_a_unit_is_a_sound_with_its_text():
    _, processor = a_speaker()
    sounds = [sound(), sound(0.4, 16000, 2, "FLAC"), sound(1.2), sound()]
    units = UNITS["speech"](sounds, [*SAID[:2], "a", " ".join(SAID)], processor, 24)
    assert len(units) == 2  # the third is too long to be heard, the fourth's text to be written
    start, plain, *words, end = processor.tokenizer(SAID[0])["input_ids"]
    assert units[0]["decoder_input_ids"].tolist() == [[start, plain, *words]]
    assert units[0]["labels"].tolist() == [[plain, *words, end]]
    assert units[0]["input_features"].shape == (1, 8, 100)
    twice = sound(0.4, 16000)  # nothing to resample, and both channels alike
    samples, _ = soundfile.read(io.BytesIO(twice["bytes"]), dtype="float32")
    features = processor.feature_extractor(samples, sampling_rate=16000, return_tensors="pt")["input_features"]
    (unit,) = UNITS["speech"]([twice], SAID[:1], processor, 24)
    torch.testing.assert_close(unit["input_features"], features)


def test_texts_are_padded_behind_and_padding_is_not_counted():
    model, processor = a_speaker()
    other = speech(1)[0]
    units = UNITS["speech"]([sound(0.2), sound(0.4), sound(0.6)], SAID, processor, 24)
    batch = joined(units, 7)
    longest = max(unit["labels"].shape[1] for unit in units)
    assert batch["labels"].shape == batch["decoder_input_ids"].shape == (3, longest)
    short = units[1]["labels"].shape[1]
    assert short < longest
    assert set(batch["labels"][1, short:].tolist()) == {-100}
    assert set(batch["decoder_input_ids"][1, short:].tolist()) == {7}
    assert batch["decoder_attention_mask"][1].tolist() == [1] * short + [0] * (longest - short)
    kl, same, predictions = 0.0, 0, 0
    for unit in units:
        inputs = {name: unit[name] for name in ("input_features", "decoder_input_ids")}
        expected, given = (network(**inputs).logits[0].double().log_softmax(-1) for network in (model, other))
        kl += (expected.exp() * (expected - given)).sum().item()
        same += int((expected.argmax(1) == given.argmax(1)).sum())
        predictions += len(expected)
    change = change_of_outputs(model, other, [batch])
    assert change["kl"] == pytest.approx(kl / predictions, rel=1e-5)
    assert change["agreement"] == same / predictions
