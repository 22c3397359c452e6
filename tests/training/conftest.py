import pytest

pytest.register_assert_rewrite("hardening_runs", "tiny_training")
