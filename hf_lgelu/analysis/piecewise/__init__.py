"""Affine pieces of ReLU networks, and how far the swap can move a network."""
