"""Without a usable native link the Python one is used and the report has the reason: no library, another library, another xgrammar."""

from __future__ import annotations

import importlib.metadata
import shutil
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import pytest

from stepgraph import EngineConfig
from stepgraph.sampling import native as library
from stepgraph.sampling.grammar.link import native, xgrammar_binding
from stepgraph.sampling.grammar.link.native import NativeLibrary, load
from stepgraph.sampling.native import Unavailable, find_library
from tests.helpers.toy_engines import CONSTRAINTS, Setup, finish, make_engine, needs_native, plain

COMPILER = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
NOT_BUILT = "it was not built: there was no C compiler when stepgraph was installed"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "load", lambda: NativeLibrary(find_library(tmp_path)))
    native._warn_once.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_without_a_library_there_is_one_warning_a_note_and_the_same_output() -> None:
    with pytest.warns(RuntimeWarning, match=f"driven from Python, under the GIL: no native link, {NOT_BUILT}") as caught:
        engine = make_engine(Setup(k=2))
    assert [Path(one.filename).name for one in caught if one.category is RuntimeWarning] == ["toy_engines.py"], "Engine's caller"
    assert engine.notes[0] == f"host link: python, under the GIL: no native link, {NOT_BUILT}"
    job = engine.submit([1], constraint=CONSTRAINTS[1], max_new_tokens=30)
    finish(engine)
    assert job.tokens == plain([1], 30, CONSTRAINTS[1]).tokens
    engine.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine(Setup(k=2)).close()  # warned once


@pytest.mark.usefixtures("no_library")
def test_native_without_a_library_is_an_error_and_python_needs_no_warning() -> None:
    with pytest.raises(RuntimeError, match=f"host_link 'native': {NOT_BUILT}"):
        make_engine(Setup(k=2, host_link="native"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = make_engine(Setup(k=2, host_link="python"))
    assert engine._parts.host_link.name == "python, under the GIL"
    engine.close()


@pytest.mark.parametrize("host_link", ["auto", "python"])
def test_check_masks_uses_the_python_link(host_link: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = make_engine(Setup(k=2, host_link=host_link), check_masks=True)
    assert engine.notes[0] == "host link: python, under the GIL: check_masks compares masks in Python"
    job = engine.submit([1], constraint=CONSTRAINTS[1], max_new_tokens=30)
    finish(engine)
    assert job.tokens == plain([1], 30, CONSTRAINTS[1]).tokens
    engine.close()


def test_an_unknown_link_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.host_link: got 'rust', expected one of 'auto', 'native', 'python'"):
        EngineConfig(host_link="rust")  # type: ignore[arg-type]


@needs_native
def test_the_report_names_the_native_link() -> None:
    engine = make_engine(Setup(k=1))
    name = engine._parts.host_link.name
    assert name.startswith("native, ") and name.endswith("no GIL")
    engine.close()


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_with_a_compiler_the_library_loads() -> None:
    assert load().node_address


def test_a_file_that_is_not_a_library_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(b"not an object file")
    with pytest.raises(Unavailable, match=r"_native\.so cannot be loaded: "):
        NativeLibrary(path)


DIFFERENCES: list[tuple[Any, str, Any, str]] = [
    (library, "LAYOUTS", {"stepgraph_link_sizes": (2,)}, r"_native.*so was built from other sources; install stepgraph again"),
    (importlib.metadata, "version", lambda name: "0.2.10", "xgrammar: got 0.2.10, expected 0.2.8 or 0.2.9"),
    (importlib.metadata, "version", lambda name: "0.2.7", "xgrammar: got 0.2.7, expected 0.2.8 or 0.2.9"),
    (xgrammar_binding, "TVM_VERSION", (9, 9), r"tvm-ffi: got 0\.1\.\d+, expected 9\.9"),
    (xgrammar_binding, "MATCHER_TYPE_KEY", "xgrammar.Matcher", "xgrammar's matcher type: got 'xgrammar.tvm_ffi_binding.GrammarMatcher'"),
    (xgrammar_binding, "METHODS", ("accept_tokens",), "xgrammar's matcher has no method 'accept_tokens'"),
    (xgrammar_binding, "SYMBOLS", {"call": "TVMFFICall"}, "xgrammar's functions were not found: .*TVMFFICall"),
]


@needs_native
@pytest.mark.parametrize(
    ("module", "name", "value", "message"), DIFFERENCES, ids=[f"{name}: {message}" for _, name, _, message in DIFFERENCES]
)
def test_a_library_that_differs_is_not_called(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any, message: str) -> None:
    path = find_library()
    monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(xgrammar_binding, "TESTED_VERSIONS", {"xgrammar": ()})
    with pytest.raises(Unavailable, match=message):
        NativeLibrary(path)


@needs_native
def test_the_installed_versions_are_known_and_bound() -> None:
    assert xgrammar_binding.versions_are_tested(), "update TESTED_VERSIONS, or every engine imports xgrammar, and with it transformers"
    assert NativeLibrary(find_library()).xgrammar.struct.call
