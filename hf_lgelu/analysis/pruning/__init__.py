"""Zeros of activations, and hidden units taken out."""
