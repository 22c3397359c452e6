"""Modules of `evaluate`, one folder each, so that `evaluate.load(folder)` takes them as well."""
