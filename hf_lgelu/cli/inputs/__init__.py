"""Inputs of a model from a data set that `datasets` reads: Hub id, folder, or file."""
