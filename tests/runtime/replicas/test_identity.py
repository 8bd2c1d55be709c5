"""Which engines count as equal, in one process and in another one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph import EngineConfig, LogitsProcessor, ProcessorInput
from stepgraph.runtime.replicas import replica
from stepgraph.sampling import native
from tests.helpers.toy_engines import Setup, make_engine

SETUP = Setup(k=2, buckets=(4,))
PROGRAM = """
from stepgraph.runtime.replicas.replica import identity_of
from tests.runtime.replicas.test_identity import SETUP, make_engine
print(identity_of(make_engine(SETUP)))
"""


def identity_with(**settings: Any) -> str:
    of_setup = {name: settings.pop(name) for name in settings.keys() & Setup.__dataclass_fields__.keys()}
    with make_engine(replace(SETUP, **of_setup), **settings) as engine:
        return replica.identity_of(engine)


@pytest.mark.slow
def test_equal_engines_have_equal_identities_in_every_process() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == identity_with() == identity_with(max_queued=7) == identity_with(num_pages=40)


@pytest.mark.parametrize("settings", [{"k": 1}, {"draft_masks": False}, {"prefill_chunk": 9}])
def test_settings_that_may_change_a_bit_change_the_identity(settings: Any) -> None:
    assert identity_with(**settings) != identity_with()


def test_hardware_and_weights_change_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(SETUP) as engine:
        before = replica.identity_of(engine)
        engine._parts.models.target.bias[3] += 1  # type: ignore[attr-defined]
        changed = replica.identity_of(engine)
        engine._parts.models.target.bias[3] -= 1  # type: ignore[attr-defined]
        assert replica.identity_of(engine) == before != changed
        with monkeypatch.context() as patch:
            other = "" if native.why_not() else "no C compiler"
            patch.setattr(native, "why_not", lambda: other)
            assert replica.identity_of(engine) != before
        monkeypatch.setattr(replica, "_cpu_fields", lambda *fields: "another processor")
        assert replica.identity_of(engine) != before


def test_addresses_of_objects_are_not_part_of_the_identity() -> None:
    class Same:
        def __call__(self, logits: torch.Tensor, given: ProcessorInput) -> torch.Tensor:
            return logits

        def __repr__(self) -> str:
            return f"<Same object at 0x{next(addresses):x}>"

    addresses = itertools.count(1 << 40)
    processors = (LogitsProcessor("same", Same()),)
    assert len({identity_with(greedy_only=False, logits_processors=processors) for _ in range(2)}) == 1


def test_every_setting_excluded_from_the_identity_exists() -> None:
    assert {*replica._IGNORED_SETTINGS} <= {*EngineConfig.__dataclass_fields__}
