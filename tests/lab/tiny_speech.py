"""A tiny Whisper with random weights, and sounds for it."""

import functools
import io

import numpy as np
import soundfile
import torch
from lgelu_lab.benchmarks.wikitext import train_tokenizer
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
