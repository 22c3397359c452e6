"""Comparison of networks on the same inputs: the distance of their outputs, their scores, and their zeros."""
