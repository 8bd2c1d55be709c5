"""Tests over the stub CUDA libraries. They run in the environment of `make stub-cuda`; elsewhere they are skipped.

The libraries themselves are loaded by tests/conftest.py, which imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stepgraph.graphs.cuda.backend import CudaBackend
from tests.stub_cuda.preload import is_stub_environment

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.stub_cuda)
            if not is_stub_environment():
                item.add_marker(pytest.mark.skip(reason="needs the CUDA build of torch without CUDA libraries: make stub-cuda"))


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    made = CudaBackend()
    yield made
    made.close()
