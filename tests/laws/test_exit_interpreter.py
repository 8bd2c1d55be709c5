"""Interpreter exit and dropped engines with rounds, compiles and saving in progress: clean, and without leftovers or losses."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from stepgraph import Engine, EngineConfig
from stepgraph.graphs import TapeBackend
from stepgraph.sampling.grammar import GrammarLimits
from stepgraph.sampling.native import why_not
from tests.helpers.c_library import NO_LINK_WARNING
from tests.helpers.toy_engines import CONSTRAINTS, DRAFTERS, TARGET, VOCABULARY
from tests.laws.test_fault_sweep import threads
from tests.sampling.grammar.compile.test_compiler import SLOW, busy_worker, gone, waited
from tools.train.saved_states import SavedStates

EXITING = """
import atexit, os, sys, time, warnings
atexit.register(lambda: print(os.getpid() == parent and [engine.stats().grammars.running for engine in engines]))  # called last
from stepgraph.graphs import TapeBackend
from stepgraph import Constraint, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget

parent, folder, vocabulary = os.getpid(), sys.argv[1], Vocabulary.printable()
target, free = ToyTarget(vocabulary.logits_width), SamplingParams(temperature=0, ignore_eos=True)

def engine(isolation, **options):
    config = EngineConfig(max_rows=2, num_speculative_tokens=2, max_length=64, rounds_in_flight=4, eager=True, backend="tape",
                          compile_isolation=isolation, max_compiles=1, **options)
    made = Engine(target, ToyDraft(target), vocabulary=vocabulary, config=config, backend=TapeBackend(asynchronous=True))
    made.capture()
    return made

engines = [engine("process"), engine("none", save_hidden_states=folder)]
engines[1].generate([1], max_new_tokens=9, sampling=free)  # its hidden states are not written yet: the shard is not full
engines[0].compile(Constraint.regex("a"))
(worker,) = engines[0]._parts.compiler._workers
print(worker.pid, *{"torch._dynamo", "transformers", "xgrammar"}.intersection(sys.modules))
sys.stdout.flush()
warnings.simplefilter("ignore", DeprecationWarning)
if os.fork() == 0:
    sys.exit()  # runs all exit handlers
assert os.wait()[1] == 0 and worker._process.popen.poll() is None
for one, repeats in zip(engines, (29_000, 1_500)):
    one.submit([2], max_new_tokens=50, sampling=free)
    for _ in range(3):
        one.step()
    one.submit([3], constraint=Constraint.ebnf("root ::= " + "[a]*" * repeats), max_new_tokens=9)
while not all(one.stats().grammars.running for one in engines):
    time.sleep(0.001)
"""


@pytest.mark.slow
def test_interpreter_exits_cleanly_during_rounds_and_compiles(tmp_path: Path) -> None:
    """One grammar takes minutes in its worker process, one about a second in this process; nothing was closed."""
    ran = subprocess.run(
        [sys.executable, *NO_LINK_WARNING, "-c", EXITING, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    started, of_the_fork, running = ran.stdout.splitlines()
    worker, *imported = started.split()
    assert imported == [] or why_not(), "the engine imported packages that are slow to import"
    assert (of_the_fork, running) == ("False", "[0, 0]"), "a compile was still running at exit"
    waited(lambda: gone(int(worker)), "the worker process is still running")
    (text,) = SavedStates(tmp_path)
    assert len(text.token_ids) == 10, "buffered hidden states are lost"


def test_unclosed_engine_ends_when_dropped(tmp_path: Path) -> None:
    """With rounds in flight and a compile that ends at its time limit."""
    before = threads()
    config = EngineConfig(
        max_rows=2,
        num_speculative_tokens=2,
        draft_length=2,
        max_length=64,
        rounds_in_flight=4,
        greedy_only=True,
        eager=True,
        grammar_limits=GrammarLimits(compile_seconds=1),
        compile_isolation="process",
        max_compiles=1,
        save_hidden_states=tmp_path / "states",
        backend="tape",
    )
    backend = TapeBackend(asynchronous=True)
    engine = Engine(TARGET, DRAFTERS["fair"](), vocabulary=VOCABULARY, config=config, backend=backend, record=tmp_path / "run.jsonl")
    engine.capture()
    compiler, job = engine._parts.compiler, engine.generate([1], max_new_tokens=9)
    assert compiler is not None and CONSTRAINTS[4] is not None
    engine.compile(CONSTRAINTS[4])
    for constraint in (CONSTRAINTS[4], None, SLOW):
        engine.submit([3], constraint=constraint, max_new_tokens=30)
        engine.step()
    pid, alive = busy_worker(compiler), weakref.ref(engine)
    del engine, compiler, backend
    gc.collect()
    assert alive() is None
    waited(lambda: threads() <= before, "a thread is still running")
    waited(lambda: gone(pid), "the worker process is still running")
    (text,) = SavedStates(tmp_path / "states")
    assert text.token_ids.tolist() == [1, *job.tokens], "buffered hidden states are lost"


RELEASED_LATE = """
import functools, time
from stepgraph.graphs.tape.player import Worker

class Model:
    def __del__(self):
        time.sleep(0.5)  # without the GIL, as the release of a tensor
        print("released", flush=True)

worker = Worker("test")
worker.submit(functools.partial(str, Model()))
worker.stop()
del worker
"""


@pytest.mark.slow
def test_interpreter_waits_for_threads_that_release_a_model_of_a_closed_engine() -> None:
    ran = subprocess.run([sys.executable, "-c", RELEASED_LATE], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "released\n", "")
