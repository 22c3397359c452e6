"""What makes runs of tiny models quick and their sums ordered."""

import pytest
import torch

pytest.register_assert_rewrite("hardening_runs", "tiny_training")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
