"""Runtime tests run on one CPU thread: tensors are tiny, and a thread pool on a busy machine only waits."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Set, and restore, torch's thread count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
