"""One small test for each promise of SECURITY.md, by number; docstrings name the tests that cover it at large."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stepgraph import Constraint, Engine, EngineConfig, FinishReason, SamplingParams
from stepgraph.runtime.extras.record import Recording
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.sampling.grammar import GrammarCompiler, MaskStatus
from tests.fuzz.watch import Watch
from tests.helpers.families import folder_of
from tests.helpers.grammar_texts import PRINTABLE
from tests.helpers.simulated_worlds import UNCOMPILABLE
from tests.helpers.toy_engines import COMPILER, CONSTRAINTS, CONTROL, STOP, TARGET, VOCABULARY, Setup, make_engine
from tests.laws.test_request_faults import PoisonedTarget
from tests.runtime.test_request_queue import check_undisturbed, submitted

SETUP = Setup(k=2, max_rows=2, eager=True)
PLAIN = EngineConfig(max_rows=2, num_speculative_tokens=0, max_length=64, page_size=4, eager=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make_engine(SETUP) as created:
        yield created


def test_promise_1_a_fault_is_one_requests_error(engine: Engine) -> None:
    """Covered by test_grammar_bombs.py, test_fault_sweep.py and test_simulation.py."""
    jobs = submitted(engine)
    bomb = engine.submit([3], constraint=UNCOMPILABLE, max_new_tokens=8)
    while engine.has_work:
        engine.step()
    assert bomb.finish_reason == FinishReason.ERROR and "no value satisfies" in bomb.error
    check_undisturbed(jobs)


def test_promise_2_refusal_is_one_sentence_and_changes_nothing(engine: Engine) -> None:
    """Covered by test_fuzz.py and test_validate.py."""
    engine.backend.synchronize()  # the last round of an earlier test may still be counted
    before = engine.stats()
    invalid: dict[str, Any] = {"prompt": ["x" * 10**6], "max_new_tokens": 10**5000, "draft_ids": [[1] * 10**5]}
    for field, value in invalid.items():
        with pytest.raises(ValueError, match=rf"^{field}(\[0\])?: got .*, expected ") as caught:
            engine.submit(**{"prompt": [1], "max_new_tokens": 4, field: value})
        assert len(str(caught.value)) < 300
    assert engine.stats() == before and not engine.has_work


def test_promise_3_options_that_are_not_enforced_are_refused() -> None:
    """Covered by test_schema_suite.py and test_schema_fuzz.py."""
    for refused, named in (
        (lambda: COMPILER.compile(Constraint.json_schema({"uniqueItems": True})), "#: uniqueItems: got true, which is enforced for a list"),
        (lambda: Constraint.response_format({"type": "json_object", "strict": True}), r"response_format\.strict: got an unknown field"),
        (lambda: SamplingParams(temperature=0, top_p=0), r"SamplingParams\.top_p: got 0"),
    ):
        with pytest.raises(ValueError, match=named):
            refused()
    with pytest.raises(TypeError, match="mirostat"):
        SamplingParams(mirostat=1)  # type: ignore[call-arg]


def test_promise_4_a_worker_that_dies_is_replaced() -> None:
    """Covered by test_compiler.py and test_request_queue.py."""
    compiler = GrammarCompiler(PRINTABLE, max_threads=1, isolation="process", max_compiles=1)
    compiler.compile(Constraint.regex("a"))
    (worker,) = compiler._workers
    assert worker is not None and worker.pid is not None
    pid = worker.pid
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    compiler.compile(Constraint.regex("b"))
    assert compiler.stats.workers_started == 2
    compiler.close()


def test_promise_5_a_text_obeys_its_grammar(engine: Engine) -> None:
    """Covered by test_greedy_oracle.py and test_round.py."""
    for constraint in filter(None, CONSTRAINTS):
        job, matcher = engine.generate([7, 8], constraint=constraint, max_new_tokens=20), COMPILER.compile(constraint).matcher()
        assert all(matcher.accept_token(token) for token in job.tokens), job


def test_promise_6_no_control_token_is_legal_under_a_grammar() -> None:
    """Covered by test_library_bugs.py."""
    random, masks = Random(0), torch.zeros(1, VOCABULARY.mask_words, dtype=torch.int32)
    for constraint in (
        Constraint.json_object(),
        Constraint.regex("[^]*"),
        Constraint.json_schema({"type": "string"}, backend="llguidance"),
    ):
        matcher = COMPILER.compile(constraint).matcher()
        for _ in range(20):
            assert matcher.fill_next_token_bitmask(masks, 0) in (MaskStatus.OK, MaskStatus.COMPLETE)
            legal = np.flatnonzero(np.unpackbits(masks.numpy().view(np.uint8), bitorder="little")).tolist()
            assert CONTROL not in legal and max(legal) <= CONTROL and not matcher.accept_token(CONTROL)
            if legal == [STOP]:
                break
            assert matcher.accept_token(random.choice([token for token in legal if token != STOP]))


def test_promise_7_no_code_of_a_model_folder_runs(tmp_path: Path) -> None:
    """Covered by test_checkpoint.py, test_draft.py and test_fuzz.py."""
    folder = Path(shutil.copytree(folder_of("smollm2"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}), encoding="utf-8")
    (folder / "modeling_evil.py").write_text("raise SystemExit", encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    open_checkpoint(folder_of("smollm2")).load("cpu")  # the first load imports modules, whatever the folder
    watch = Watch()
    with watch.around():
        open_checkpoint(folder).load("cpu")
    assert watch.faults() == [] and "modeling_evil" not in sys.modules
    (folder / "model.safetensors").rename(folder / "weights.safetensors")  # else the index would not be used
    for target in ("../model/weights.safetensors", "/etc/passwd", "pytorch_model.bin"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"expected the name of a \.safetensors file"):
            open_checkpoint(folder)


def test_promise_8_non_finite_numbers_are_refused_or_end_the_request(tmp_path: Path) -> None:
    """Covered by test_checkpoint.py, test_request_faults.py and test_fault_sweep.py."""
    folder = Path(shutil.copytree(folder_of("smollm2"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds NaN or infinity"):
        open_checkpoint(folder).load("cpu")
    target = PoisonedTarget(VOCABULARY.logits_width, seed=3)
    with Engine(target, vocabulary=VOCABULARY, config=PLAIN) as engine:
        engine.capture()
        bad, good = engine.submit([1, 13], max_new_tokens=4), engine.submit([1, 2], max_new_tokens=4)
        while engine.has_work:
            engine.step()
    assert (bad.finish_reason, bad.tokens) == (FinishReason.ERROR, []) and "not finite" in bad.error
    assert good.finish_reason != FinishReason.ERROR and good.tokens


def test_promise_9_different_salts_share_no_pages() -> None:
    """Covered by test_page_cache.py."""
    with Engine(TARGET, vocabulary=VOCABULARY, config=PLAIN) as engine:
        prompt = [*range(20)]
        found = [engine.generate(prompt, max_new_tokens=2, cache_salt=salt).num_cached_tokens for salt in ("a", "b", "a", "")]
    assert found[0] == found[1] == found[3] == 0 < found[2]


def test_promise_10_a_recording_is_private_and_bounded(tmp_path: Path) -> None:
    """Covered by test_replay.py."""
    path = tmp_path / "run.jsonl"
    with Engine(TARGET, vocabulary=VOCABULARY, config=PLAIN, record=Recording(path, max_bytes=5000)) as engine:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for _ in range(3):
            engine.generate([1, 2], max_new_tokens=2)
        with pytest.warns(RuntimeWarning, match=r"its size reached Recording\.max_bytes"):
            engine.generate([1] * 40, max_new_tokens=2, cache_salt="x" * 2000)
    assert path.stat().st_size <= 5000 + 100
    with pytest.raises(ValueError, match="File exists"):
        Engine(TARGET, vocabulary=VOCABULARY, config=PLAIN, record=path)
