"""Two ranks of a tensor-parallel engine, each a process, against one process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from stepgraph import Engine
from tests.helpers.command_models import model_folder
from tests.helpers.parallel_program import decode


@contextlib.contextmanager
def ranks(folders: list[Path], draft: str, counts: tuple[int, int] = (4, 4), **changes: Any) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(folders))}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.parallel_program", str(folder), draft, json.dumps(changes | {"count": counts[rank]})],
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def result(process: subprocess.Popen[str]) -> Any:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("draft", ["ngram", pytest.param("none", marks=pytest.mark.soak)])
def test_two_ranks_give_the_tokens_of_one_process(draft: str) -> None:
    """Plain, sampled and with grammars, with and without drafts."""
    folder = model_folder()
    with ranks([folder, folder], draft) as started:
        found = [result(process) for process in started]
    alone = json.loads(json.dumps(decode(str(folder), draft, 1)))
    assert found[0]["jobs"] == found[1]["jobs"] == alone["jobs"] and not found[0]["error"]
    assert found[0]["weights"] < alone["weights"]


@pytest.mark.soak
@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_or_stopped_rank_ends_the_jobs_of_the_other_in_time(lost: signal.Signals) -> None:
    folder = model_folder()
    with ranks([folder, folder], "none", round_timeout_seconds=5.0) as (first, second):
        assert second.stdout is not None and second.stdout.readline() == "step\n"
        second.send_signal(lost)
        since = time.monotonic()
        found = result(first)
        assert time.monotonic() - since < 5 + 5  # and the end of the process
    assert "Error" in found["error"] and any(failed for _, _, failed in found["jobs"])
    assert all(reason == "error" or not failed for _, reason, failed in found["jobs"])


@pytest.mark.soak
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_other_weights_on_one_rank_are_found_at_load(tmp_path: Path, name: str) -> None:
    folder, other = model_folder(), Path(shutil.copytree(model_folder(), tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors[name][..., -1] += 0.125
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with ranks([folder, other], "none") as started:
        errors = [process.communicate(timeout=60)[1] for process in started]
    assert all(f"{name}: rank" in error and "loaded other weights" in error for error in errors), errors


@pytest.mark.parametrize(("size", "accepted"), [(2, "torchrun --nproc-per-node 2"), (0, "an integer >= 1"), ("2", "an integer >= 1")])
def test_a_number_of_ranks_that_cannot_run_is_refused(size: Any, accepted: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel: got {size!r}.*{accepted}"):
        Engine.from_pretrained(model_folder(), tensor_parallel=size)


@pytest.mark.soak
def test_other_requests_on_one_rank_end_all_jobs() -> None:
    with ranks([model_folder()] * 2, "none", counts=(4, 3), round_timeout_seconds=20.0) as started:
        found = [result(process) for process in started]
    for each in found:
        assert "the requests or the results of the steps before differ" in each["error"] and each["seconds"] < 20
        assert all(reason == "error" for _, reason, _ in each["jobs"])
