"""Changes of models: surgery, config keys, records and loading, hardening, optimizer groups, and an MLP."""
