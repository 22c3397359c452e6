"""Speech: a Whisper out of CTranslate2's file, its sounds as units, and its word errors against a plain recursion."""

import functools
import io

import numpy as np
import pytest
import soundfile
import torch
from lgelu_lab.benchmarks.real_inputs import UNITS, joined
from lgelu_lab.benchmarks.wikitext import train_tokenizer
from lgelu_lab.measurements import real_tasks
from lgelu_lab.measurements.conversion import change_of_outputs
from lgelu_lab.measurements.real_tasks import TASKS
from tokenizers.processors import TemplateProcessing
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizerFast,
)

SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>")
SAID = ("the cat sat on a mat", "a house", "and then it left the house for a long walk")


def speech(seed=0):
    """(a tiny Whisper with random weights, its processor): one second of sound, 8 mel bands."""
    words = train_tokenizer([" ".join(SAID)] * 20, 280, 64).backend_tokenizer
    words.add_special_tokens(list(SPECIAL))
    end, start, plain = map(words.token_to_id, SPECIAL)
    words.post_processor = TemplateProcessing(
        single=f"{SPECIAL[1]} {SPECIAL[2]} $A {SPECIAL[0]}",
        special_tokens=list(zip(SPECIAL, (end, start, plain), strict=True)),
    )
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL[0])
    tokenizer = WhisperTokenizerFast(tokenizer_object=words, **ends)
    config = WhisperConfig(
        vocab_size=len(tokenizer), d_model=12, num_mel_bins=8, max_source_positions=50, max_target_positions=24,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=3, encoder_ffn_dim=24,
        decoder_ffn_dim=20, decoder_start_token_id=start, bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # no bias is zero, no norm plain
            weight.mul_(2.0)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start, bos_token_id=end, eos_token_id=end, pad_token_id=end, suppress_tokens=[],
        begin_suppress_tokens=[end], no_timestamps_token_id=plain, is_multilingual=False, return_timestamps=False,
        max_length=24,
    )  # fmt: skip
    return model, WhisperProcessor(WhisperFeatureExtractor(8, chunk_length=1), tokenizer)


@functools.cache
def a_speaker():
    return speech()


def sound(seconds=0.5, rate=8000, channels=1, form="WAV"):
    """As datasets holds an undecoded one: a tone that rises."""
    times = np.arange(int(seconds * rate)) / rate
    waves = np.stack([np.sin(2 * np.pi * (300 + 400 * times + 50 * c) * times) for c in range(channels)], 1)
    file = io.BytesIO()
    soundfile.write(file, 0.3 * waves, rate, format=form)
    return {"bytes": file.getvalue(), "path": None}


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
