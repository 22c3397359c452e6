import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """Networks of some units are slower on two threads, and crawl where another process has one of the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
