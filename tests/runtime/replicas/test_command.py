"""`stepgraph serve --replicas` in a process of its own, with OpenAI's client, while a replica is killed. `make replicas` runs this."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from stepgraph.runtime import cli
from stepgraph.runtime.serve.http import Bounds
from tests.helpers.running_server import FORMAT, ON, engine_of, running

ASKS: list[dict[str, Any]] = [
    {"prompt": "abc", "max_tokens": 300, "temperature": 0, "extra_body": ON},
    {"prompt": "abd", "max_tokens": 300, "temperature": 0.9, "seed": 4, "extra_body": ON},
    {"prompt": "who is it?", "max_tokens": 60, "temperature": 0.3, "seed": 1, "extra_body": {"response_format": FORMAT}},
]
FLAGS = "serve toy --eager -k 2 --draft-length 2 --max-rows 4 --max-length 1024 --no-log".split()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--replicas 0", "--replicas: got 0-0, expected numbers from 1 to 1000, the least first"),
        ("--replicas 4-2", "--replicas: got 4-2, expected numbers from 1 to 1000, the least first"),
        ("--replicas many", "argument --replicas: got 'many', expected a number of replicas, or the least and the most, such as 1-4"),
        ("--replicas 2 --replica-gpus nan", "--replica-gpus: got nan, expected a number from 0 to 4096"),
        ("--tensor-parallel 2", "--tensor-parallel: got 2 with toy, expected 1: its layers cannot be divided"),
        ("--round-timeout-seconds 0", "--round-timeout-seconds: got 0.0, expected a number above 0 and at most 86400"),
        ("--round-timeout-seconds nan", "--round-timeout-seconds: got nan, expected a number above 0 and at most 86400"),
        ("--tensor-parallel 0", "--tensor-parallel: got 0, expected a whole number from 1 to 1024"),
    ],
)
def test_wrong_flags_are_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main([*FLAGS, *flags.split()])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2 and message in capsys.readouterr().err


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "stepgraph", *FLAGS, "--port", "0", "--replicas", "2", "--replica-cpus", "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
    assert process.returncode == 0


@pytest.mark.replicas
def test_streams_over_http_survive_a_kill(server: tuple[subprocess.Popen[str], str]) -> None:
    """The texts are those of a server without replicas."""
    _, url = server
    with engine_of(FLAGS) as engine, running(engine, Bounds()) as alone, alone.client as client:
        wanted = [client.completions.create(model="toy", **ask).choices[0].text for ask in ASKS]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
        streams: list[Any] = [client.completions.create(model="toy", stream=True, **ask) for ask in ASKS]
        texts = [next(iter(stream)).choices[0].text for stream in streams]
        victims = [int(pid) for pid in replica_processes()]
        assert len(victims) == 2
        os.kill(victims[0], signal.SIGKILL)
        for index, stream in enumerate(streams):
            for chunk in stream:
                texts[index] += chunk.choices[0].text
        again = [client.completions.create(model="toy", **ask).choices[0].text for ask in ASKS]
    assert texts == again == wanted


def replica_processes() -> list[str]:
    """Ray names the processes of replicas after their application."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in found.splitlines() if "ray::ServeReplica:stepgraph" in line]
