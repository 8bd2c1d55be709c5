"""Every test runs with one torch thread and a derandomised hypothesis: the same cases on every machine."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.marked import may_have
from tests.helpers.parts import in_part, parse_part
from tests.stub_cuda.preload import preload_where_needed

preload_where_needed()  # before anything imports torch

import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(1)
gc.set_threshold(10_000, 10, 10)  # fewer full collections: they took a twentieth of the test time
settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class Loggers(dict[str, Any]):
    """pytest 9.2 iterates over all loggers before each test; meanwhile a thread of an engine may import modules that add some."""

    def values(self) -> Any:
        return list(super().values())


logging.root.manager.loggerDict = Loggers(logging.root.manager.loggerDict)

MARKERS = ("slow", "soak", "models", "replicas", "clients", "browser")  # tests/stub_cuda has a folder of its own

# Files with a test that takes longer than all that remains for the other processes when it starts late.
LONGEST = ("tools/gpu/test_gpu_check.py", "sampling/kernels/test_kernels.py", "parallel/test_tensor_parallel.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=parse_part, default=(0, 1), metavar="I/N", help="run only one of N parts of the selected tests, from 0/N to N-1/N"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of a run with one marker, such as `-m slow`: the files without such tests, whose imports take longer than some of these tests."""
    wanted = config.option.markexpr
    is_left_out = wanted in MARKERS and collection_path.is_file() and not may_have(collection_path, wanted)
    return True if is_left_out else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    marks = {(item.path, mark.name) for item in items for mark in item.iter_markers() if mark.name in MARKERS}
    if unnamed := [f"{path} has tests marked {marker}" for path, marker in marks if not may_have(path, marker)]:
        raise pytest.UsageError(f"{', '.join(unnamed)}, but does not name the marker, by which `pytest -m` finds the file")
    yield  # the deselection by marker
    part = config.getoption("part")
    config.hook.pytest_deselected(items=[item for item in items if not in_part(item.nodeid, part)])
    items[:] = [item for item in items if in_part(item.nodeid, part)]
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))


def pytest_collection_finish() -> None:
    _let_be()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or item.path != nextitem.path:
        _let_be()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else frozen objects are not finalised at exit, and some libraries report leaks


def _let_be() -> None:
    """Exclude live objects from later collections: modules and engines that several tests share live until the process exits."""
    gc.collect()
    gc.freeze()
