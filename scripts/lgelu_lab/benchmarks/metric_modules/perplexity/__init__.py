"""The module `perplexity`."""
