"""What all tests share: one thread per process, and ranks that are killed at the end of the session."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    from tests.multirank.runner import close_worlds

    close_worlds()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays
