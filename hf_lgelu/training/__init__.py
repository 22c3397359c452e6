"""How λ-GELU learns and hardens: parameter groups, schedules, hardening, and all of it in a Trainer."""
