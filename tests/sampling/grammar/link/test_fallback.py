"""Where the native link cannot be, the Python one takes its place and says why: no library, another one, another xgrammar."""

from __future__ import annotations

import importlib.metadata
import shutil
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import pytest

from stepgraph import EngineConfig
from stepgraph.sampling.grammar.link import library as native
from stepgraph.sampling.grammar.link import native as native_link
from stepgraph.sampling.grammar.link import xgrammar_binding
from stepgraph.sampling.grammar.link.library import NativeLibrary, Unavailable, find_library, load
from tests.helpers.toy_engines import CONSTRAINTS, Setup, make_engine, needs_native, plain

COMPILER = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
GONE = "it was not built: there was no C compiler when stepgraph was installed"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native_link, "load", lambda: NativeLibrary(find_library(tmp_path)))
    monkeypatch.setattr(native_link, "_warned", set())


@pytest.mark.usefixtures("no_library")
def test_without_a_compiler_there_is_one_warning_and_a_note_and_the_same_texts() -> None:
    with pytest.warns(RuntimeWarning, match=f"driven from Python, under the GIL: no native link, {GONE}") as caught:
        engine = make_engine(Setup(k=2))
    assert [Path(one.filename).name for one in caught if one.category is RuntimeWarning] == ["toy_engines.py"], "who made the engine"
    assert engine.config.notes(engine._host.name)[0] == f"host link: python, under the GIL: no native link, {GONE}"
    job = engine.submit([1], constraint=CONSTRAINTS[1], max_new_tokens=30)
    for _ in engine.stream():
        pass
    assert job.tokens == plain([1], 30, CONSTRAINTS[1]).tokens
    engine.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine(Setup(k=2)).close()  # told once


@pytest.mark.usefixtures("no_library")
def test_who_asked_for_the_native_link_gets_it_or_an_error_and_who_asked_for_python_is_not_warned() -> None:
    with pytest.raises(RuntimeError, match=f"host_link 'native': {GONE}"):
        make_engine(Setup(k=2, host_link="native"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = make_engine(Setup(k=2, host_link="python"))
    assert engine._host.name == "python, under the GIL"
    engine.close()


def test_a_link_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.host_link: got 'rust', want one of auto, native, python"):
        EngineConfig(host_link="rust")


@needs_native
def test_the_report_says_what_drives_the_matchers() -> None:
    engine = make_engine(Setup(k=1))
    name = engine._host.name
    assert name.startswith("native, ") and name.endswith("no GIL")
    engine.close()


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_where_there_is_a_compiler_the_link_is_built_and_its_tests_are_not_skipped() -> None:
    assert load().node_address


def test_a_file_that_is_no_library_is_told(tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(b"not an object file")
    with pytest.raises(Unavailable, match=r"_native\.so cannot be loaded: "):
        NativeLibrary(path)


OTHERS: list[tuple[Any, str, Any, str]] = [
    (native, "OWN_LAYOUT", (2,), r"_native.*so was built from other sources; install stepgraph again"),
    (importlib.metadata, "version", lambda name: "0.3.0", "xgrammar is 0.3.0, want 0.2.8 or a later 0.2"),
    (importlib.metadata, "version", lambda name: "0.2.7", "xgrammar is 0.2.7, want 0.2.8 or a later 0.2"),
    (xgrammar_binding, "TVM_VERSION", (9, 9), r"tvm-ffi is 0\.1\.\d+, want 9\.9"),
    (xgrammar_binding, "MATCHER", "xgrammar.Matcher", "xgrammar's matcher is called 'xgrammar.tvm_ffi_binding.GrammarMatcher'"),
    (xgrammar_binding, "SIGNATURES", {"accept_tokens": ("bool",)}, "xgrammar's matcher has no method 'accept_tokens'"),
    (xgrammar_binding, "SIGNATURES", {"rollback": ("None",)}, "xgrammar's rollback is None xgrammar.*GrammarMatcher int, want None"),
    (xgrammar_binding, "SYMBOLS", {"call": "TVMFFICall"}, "tvm-ffi has no TVMFFICall"),
]


@needs_native
@pytest.mark.parametrize(("module", "name", "value", "told"), OTHERS, ids=[f"{name}: {told}" for _, name, _, told in OTHERS])
def test_what_is_not_as_it_was_when_this_was_written_is_not_called(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any, told: str
) -> None:
    path = find_library()
    monkeypatch.setattr(module, name, value)
    with pytest.raises(Unavailable, match=told):
        NativeLibrary(path)
