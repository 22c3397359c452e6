"""What every test of models runs under."""

import logging

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def host_log(caplog):
    """The log, including what transformers says; its loggers do not propagate."""
    host = logging.getLogger("transformers")
    level = host.level  # a study that ran in this process has left it at ERROR
    host.setLevel(logging.WARNING)
    host.addHandler(caplog.handler)
    yield caplog
    host.removeHandler(caplog.handler)
    host.setLevel(level)
