"""Training of λ-GELU: arguments, a Trainer and callbacks, refusals, and resuming."""
