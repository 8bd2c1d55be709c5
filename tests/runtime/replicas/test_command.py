"""`stepgraph serve --replicas` in a process of its own, with OpenAI's client, while a replica is killed. `make replicas` runs this."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from stepgraph import Engine
from stepgraph.runtime import cli
from stepgraph.runtime.parallel.ranks import RANK_MODULE
from stepgraph.runtime.serve.http import Bounds
from tests.helpers.command_models import model_folder
from tests.helpers.documents import ROOT
from tests.helpers.running_server import FORMAT, ON, engine_of, running

ASKS: list[dict[str, Any]] = [
    {"prompt": "abc", "max_tokens": 300, "temperature": 0, "extra_body": ON},
    {"prompt": "abd", "max_tokens": 300, "temperature": 0.9, "seed": 4, "extra_body": ON},
    {"prompt": "who is it?", "max_tokens": 60, "temperature": 0.3, "seed": 1, "extra_body": {"response_format": FORMAT}},
]
REPLICA = "ray::ServeReplica:stepgraph"
FLAGS = "serve toy --eager -k 2 --draft-length 2 --max-rows 4 --max-length 1024 --no-log".split()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--replicas 0", "argument --replicas: got '0', expected a number of replicas from 1 to 1000, or the least and the most"),
        ("--replicas 4-2", "argument --replicas: got '4-2', expected a number of replicas from 1 to 1000, or the least and the most"),
        ("--replicas many", "argument --replicas: got 'many', expected a number of replicas from 1 to 1000"),
        ("--replicas 2 --replica-gpus nan", "--replica-gpus: got nan, expected a number from 0 to 4096"),
        ("--tensor-parallel 2", "--tensor-parallel: got 2 with toy, expected 1: its layers cannot be divided"),
        ("--round-timeout-seconds 0", "--round-timeout-seconds: got 0.0, expected a number from 0.001 to 86400"),
        ("--round-timeout-seconds nan", "--round-timeout-seconds: got nan, expected a number from 0.001 to 86400"),
        ("--answer-seconds 0", "--answer-seconds: got 0.0, expected a number from 0.001 to 86400"),
        ("--max-body-bytes 0", "--max-body-bytes: got 0, expected a whole number >= 1"),
        ("--max-connections 0", "--max-connections: got 0, expected a whole number >= 1"),
        ("--tensor-parallel 0", "--tensor-parallel: got 0, expected a whole number from 1 to 1024"),
    ],
)
def test_wrong_flags_are_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main([*FLAGS, *flags.split()])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2 and message in capsys.readouterr().err


@contextmanager
def serving(*flags: str, cpus: float = 0.5) -> Iterator[str]:
    """The address of a server with two replicas."""
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "stepgraph", *flags, "--port", "0", "--replicas", "2", "--replica-cpus", str(cpus)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
    assert process.returncode == 0


def require_the_texts_of_one_engine(
    url: str, flags: Sequence[str], asks: Sequence[dict[str, Any]], victims: Callable[[], list[int]]
) -> None:
    """Compares texts while the first of the two processes `victims` is killed, and afterwards."""
    with engine_of(flags) as engine, running(engine, Bounds()) as alone, alone.client as client:
        wanted = [client.completions.create(model="toy", **ask).choices[0].text for ask in asks]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
        name = client.models.list().data[0].id
        streams: list[Any] = [client.completions.create(model=name, stream=True, **ask) for ask in asks]
        texts = [next(iter(stream)).choices[0].text for stream in streams]
        found = victims()
        assert len(found) == 2
        os.kill(found[0], signal.SIGKILL)
        for index, stream in enumerate(streams):
            for chunk in stream:
                texts[index] += chunk.choices[0].text
        again = [client.completions.create(model=name, **ask).choices[0].text for ask in asks]
    assert texts == again == wanted


@pytest.mark.replicas
def test_the_address_of_a_killed_cluster_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from stepgraph.runtime.commands.serve import recorded_cluster_responds

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not recorded_cluster_responds()
    (tmp_path / "ray").mkdir()
    note = tmp_path / "ray" / "ray_current_cluster"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        note.write_text(f"127.0.0.1:{listener.getsockname()[1]}\n")
        assert recorded_cluster_responds()
    assert not recorded_cluster_responds()


@pytest.mark.replicas
def test_the_documented_deployment_runs(tmp_path: Path) -> None:
    """The deployment module has at most 300 lines."""
    source = Path(pytest.importorskip("stepgraph.runtime.replicas.ray_serve").__file__)
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 300
    program = (ROOT / "docs/scale.md").read_text(encoding="utf-8").rpartition("```text\n")[2].partition("```")[0]
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    (tmp_path / "model").symlink_to(model_folder())
    found = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    tokens = re.findall(r"\d+", " ".join(re.findall(r"^\([\d, ]+\)$", found.stdout, re.MULTILINE)))
    with Engine.from_pretrained(model_folder()) as engine:
        assert [*map(int, tokens)] == engine.generate([1, 2, 3], max_new_tokens=20).tokens


@pytest.mark.replicas
def test_streams_over_http_survive_a_kill() -> None:
    """The texts are those of a server without replicas."""
    with serving(*FLAGS) as url:
        require_the_texts_of_one_engine(url, FLAGS, ASKS, lambda: processes(REPLICA))


@pytest.mark.replicas
def test_streams_survive_the_loss_of_a_ray_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of Ray's nodes on loopback, each with room for one replica. The command uses them unchanged and leaves the cluster running."""
    cluster = pytest.importorskip("ray.cluster_utils").Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes = [cluster.add_node(num_cpus=1), cluster.head_node]
        raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]

        def end_one() -> list[int]:
            of_replicas = ",".join(map(str, processes(REPLICA)))
            found = subprocess.run(["ps", "-o", "ppid=,pid=", "-p", of_replicas], capture_output=True, text=True, check=True).stdout
            replicas = {int(line.split()[0]): int(line.split()[1]) for line in found.splitlines()}
            assert replicas.keys() == {*raylets}
            os.kill(replicas[raylets[0]], signal.SIGKILL)  # it would outlive its raylet for a moment
            return raylets

        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with serving(*FLAGS, cpus=1) as url:
            require_the_texts_of_one_engine(url, FLAGS, ASKS, end_one)
            assert continued(url)
        assert cluster.head_node.all_processes["raylet"][0].process.poll() is None and not processes(REPLICA)
    finally:
        cluster.shutdown()


def continued(url: str) -> int:
    """The number of streams that continued on another replica."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=60) as answer:
        found = re.search(r"^stepgraph_streams_continued_total (\d+)\.0$", answer.read().decode(), re.MULTILINE)
    assert found
    return int(found[1])


@pytest.mark.replicas
def test_streams_survive_a_lost_rank_of_a_divided_model() -> None:
    """The server leaves no rank running."""
    flags = "--eager -k 2 --draft-length 2 --max-rows 4 --max-length 1024 --no-log --threads 1 --dtype float32".split()
    flags = ["serve", str(model_folder()), *flags, "--round-timeout-seconds", "60", "--tensor-parallel", "2"]
    draws = ({"temperature": 0}, {"temperature": 0.9, "seed": 4})
    asks = [{"prompt": f"ab{index}", "max_tokens": 900, **draws[index % 2], "extra_body": ON} for index in range(4)]  # two on each replica
    with serving(*flags) as url:
        require_the_texts_of_one_engine(url, flags, asks, lambda: processes(RANK_MODULE))
        assert continued(url)
    end = time.monotonic() + 30
    while processes(RANK_MODULE):
        assert time.monotonic() < end
        time.sleep(0.2)


def processes(part: str) -> list[int]:
    """Process ids by command line; Ray names the processes of replicas after their application."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if part in line]
