"""What all tests share: one torch thread, a seed, repeatable Hypothesis runs, and the folder of real data."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported, and so that commands started by a test inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# No deadline: on a shared machine a slow example says nothing. The same examples for everyone, every time.
settings.register_profile("fedloom", deadline=None, derandomize=True)
settings.load_profile("fedloom")


def _data_dir() -> Path:
    """The folder of real data sets, or a skip that says why it is not there."""
    given = os.environ.get("FEDLOOM_DATA")
    if not given:
        pytest.skip("FEDLOOM_DATA is not set: it names the folder with the real data sets")
    path = Path(given).resolve()
    if not path.is_dir():
        pytest.skip(f"FEDLOOM_DATA={given} is not a folder")
    return path


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same weights for a test whatever ran before it; skip one marked `data` where there is none.

    The skip is also for tests that read the folder without the fixture.
    """
    torch.manual_seed(0)
    if item.get_closest_marker("data"):
        _data_dir()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder that FEDLOOM_DATA names; the test is skipped without it."""
    return _data_dir()
