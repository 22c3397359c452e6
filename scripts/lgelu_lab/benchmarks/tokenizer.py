"""Moved; goes when nothing imports it from here."""

from lgelu_lab.benchmarks.wikitext import load_tokenizer, train_tokenizer  # noqa: F401
