"""Inputs of a model by name: the rows of a benchmark, or of a data set that `datasets` loads."""
