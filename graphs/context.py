"""What a step uses besides tensor operations: a context with streams, events and host nodes. And the first error of launched work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

MAIN = "main"
COPY_STREAM = "copies beside rounds"  # a stream of a backend; steps do not use it


class StreamEvent(Protocol):
    """A point in a stream that another stream can wait for."""


class CaptureContext(Protocol):
    """What a step uses besides tensor operations. Calls on one stream run in the order they are made."""

    def stream(self, name: str) -> AbstractContextManager[None]:
        """Issue the operations of the block on the named stream. A side stream joins the step with its first `wait`."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Name the operations of the block, for profiles. With nested stages, a node belongs to the innermost."""

    def record(self) -> StreamEvent:
        """An event at the current point of the current stream."""

    def wait(self, event: StreamEvent) -> None:
        """Make the current stream wait for `event`."""

    def host_node(self, name: str, function: Callable[[], object], *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Call `function` on the host, in the order of the current stream, in every replay.

        It may use pinned buffers only, and must declare them in `reads` and `writes`. If it has the attributes `native_address`, the
        address of a C function `void (*)(void *)`, and `native_data`, the argument, that function is called directly, without
        the GIL; `function` must keep the data alive.
        """


NULL_CONTEXT: AbstractContextManager[None] = contextlib.nullcontext()  # shared, so that a round creates no object


_local = threading.local()


def current_context() -> CaptureContext:
    """The context of the step that this thread runs or records."""
    context: CaptureContext | None = getattr(_local, "context", None)
    if context is None:
        raise RuntimeError("current_context(): no step is running on this thread; call it inside a step given to capture() or run_eager()")
    return context


def use_context(context: CaptureContext) -> AbstractContextManager[None]:
    """Make `context` this thread's current one. For backends."""
    return temporarily_set(_local, "context", context)


@contextlib.contextmanager
def temporarily_set(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class FirstError:
    """The first error of launched work, kept until it is raised. Written by the threads that run it, read by the launching thread."""

    def __init__(self) -> None:
        self._first: BaseException | None = None

    def store(self, error: BaseException) -> None:
        self._first = self._first or error

    def take(self) -> BaseException | None:
        first = self._first
        if first is not None:  # otherwise an error that is stored meanwhile would be lost
            self._first = None
        return first

    def raise_first(self) -> None:
        if (error := self.take()) is not None:
            raise error
