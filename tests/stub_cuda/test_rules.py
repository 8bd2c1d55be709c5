"""The illegal steps of tests/graphs/tape/test_rules.py on the real torch: refused with the same rule, file and line; and host state that a
comparison of two captures finds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.graphs.tape import test_backend as baked
from tests.graphs.tape import test_rules as tape
from tests.stub_cuda.subject import Backend, CaptureError, StaticBuffers, current_context, make_backend

# What a CUDA graph can hold: the tape refuses these because of its own replay, or because a replay would use memory that changes.
LEGAL = frozenset("foreign other_default_dtype quantised_result meta_result view_of_an_opaque_tensor other_memory resized".split())
OF_CONSTANTS = frozenset(("constant_write", "weight_write"))  # the buffers here have no constants
CHECKED = frozenset(  # refused with check="twice", which records under the rules of the tape
    "to_cpu_by_keyword tensor_of_number rebind_data data_ptr storage_pointer cuda_array_interface fill_pinned pinned_to_pinned "
    "pinned_to_device set_storage wrapper_subclass result_of_a_collective wait_for_all_reduce".split()
)
# With constants of the CPU, or a library that has no stub.
OF_THE_CPU = frozenset("products embedding module recurrent_layer spectrum kernel_that_keeps_and_expands_its_results".split())
if torch.__version__ < "2.9":  # torch 2.8 copies them through memory of the host that it then frees
    CHECKED |= {"strided_upload", "broadcast_upload"}
ACCEPTED = LEGAL | OF_CONSTANTS | CHECKED
# Steps that replayed wrongly, hung or ended the process before they were refused.
NAMED = (
    "linear_solve matrix_inverse cholesky singular_values started_thread thread_of_a_pool thread_of_an_older_pool map_over_an_older_pool "
    "all_reduce wait_for_all_reduce all_reduce_in_place wrapper_subclass result_of_a_collective"
).split()


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    # Kernels do not run: a count is what its memory held before, and printing that many elements would exhaust the memory.
    for block in (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"] if block["state"] == "inactive"):
        ctypes.memset(block["address"], 0, block["size"])
    made = make_backend("cuda")
    yield made
    made.close()


@pytest.fixture
def buffers(backend: Backend) -> StaticBuffers:
    return StaticBuffers(tape.SPECS, backend.device)


process_group = tape.process_group


@pytest.fixture
def _of_this_backend(backend: Backend, buffers: StaticBuffers, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the objects of another capture that the steps use."""
    monkeypatch.setattr(tape, "BACKEND", backend)
    events: list[object] = []
    backend.capture(lambda b: events.append(current_context().record()), buffers)
    monkeypatch.setattr(tape, "EVENTS", events)
    monkeypatch.setattr(tape, "ESCAPED", [buffers.y])


@pytest.mark.usefixtures("_of_this_backend")
@pytest.mark.parametrize("name", [name for name in tape.ILLEGAL if name not in ACCEPTED])
def test_illegal(name: str, backend: Backend, buffers: StaticBuffers) -> None:
    rule, step = tape.ILLEGAL[name]
    with pytest.raises(CaptureError) as caught:
        backend.capture(step, buffers)  # type: ignore[arg-type]
    error = caught.value
    assert error.rule == rule, str(error)
    assert error.file == tape.__file__ and "# illegal" in error.source, str(error)


@pytest.mark.usefixtures("_of_this_backend")
@pytest.mark.parametrize("name", sorted(CHECKED))
def test_others_are_illegal_in_a_checked_capture(name: str, backend: Backend, buffers: StaticBuffers) -> None:
    rule, step = tape.ILLEGAL[name]
    with pytest.raises(CaptureError) as caught:
        backend.capture(step, buffers, check="twice")  # type: ignore[arg-type]
    error = caught.value
    assert error.rule == rule, str(error)
    assert error.file == tape.__file__ and "# illegal" in error.source, str(error)


@pytest.mark.parametrize("name", sorted(tape.LEGAL.keys() - OF_THE_CPU))
def test_what_the_tape_accepts_can_be_captured(name: str, backend: Backend, buffers: StaticBuffers) -> None:
    generator = torch.Generator(backend.device)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tape, "GENERATOR", generator)
        assert backend.capture(tape.LEGAL[name], buffers, generators=[generator]).report.nodes  # type: ignore[arg-type]


def test_both_back_ends_refuse_most_steps() -> None:
    assert set(tape.ILLEGAL) > ACCEPTED and len(tape.ILLEGAL) - len(ACCEPTED) >= 70
    assert set(NAMED) <= set(tape.ILLEGAL) - LEGAL - OF_CONSTANTS


@pytest.mark.parametrize(("rule", "values", "step"), baked.BAKED.values(), ids=list(baked.BAKED))
def test_host_state_in_arguments_is_found(rule: str, values: object, step: Callable[[StaticBuffers], None], backend: Backend) -> None:
    buffers = StaticBuffers(baked.SPECS, backend.device)
    baked.HOST.__init__()  # type: ignore[misc]
    backend.capture(step, buffers, check="twice")
    with pytest.raises(CaptureError) as caught:
        backend.capture(step, buffers, check="twice", between=baked.HOST.change)
    assert caught.value.rule == rule, str(caught.value)
    assert caught.value.file == baked.__file__ and "# baked" in caught.value.source, str(caught.value)


def test_a_stream_that_the_run_before_the_capture_did_not_use_is_refused(backend: Backend) -> None:
    names = iter(("of_the_run", "of_the_capture"))

    def step(b: StaticBuffers) -> None:
        context = current_context()
        event = context.record()
        with context.stream(next(names)):
            context.wait(event)
            event = context.record()
        context.wait(event)

    with pytest.raises(CaptureError, match="stream 'of_the_capture' was not used in the run before the capture") as caught:
        backend.capture(step, StaticBuffers(tape.SPECS, backend.device))
    assert caught.value.rule == "baked-branch" and caught.value.file == __file__
