"""The command hf-lgelu."""
