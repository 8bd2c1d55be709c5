"""Time that host nodes spend inside xgrammar's own functions, measured by a function in C between the native link and the library."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stepgraph.sampling.grammar.link.native import load

SOURCE = """
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

typedef int library_call(void *function, void *arguments, int32_t count, void *result);
library_call *real_call;
_Atomic int64_t spent_ns;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

int timed_call(void *function, void *arguments, int32_t count, void *result) {
    int64_t begun = now();
    int status = real_call(function, arguments, count, result);
    atomic_fetch_add(&spent_ns, now() - begun);
    return status;
}
"""


class LibraryCalls:
    def __init__(self, spent_ns: ctypes.c_int64) -> None:
        self._spent_ns = spent_ns

    def take_seconds(self) -> float:
        """Seconds in library calls of all threads, since the last call of this function."""
        spent, self._spent_ns.value = self._spent_ns.value, 0
        return spent / 1e9


@contextlib.contextmanager
def timed_library_calls() -> Iterator[LibraryCalls | None]:
    """Times the library's calls until the context ends. Yields None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "timed.c"), Path(folder, "timed.so")
        source.write_text(SOURCE, encoding="ascii")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", built, source], check=True)
        library = ctypes.CDLL(str(built))
    binding = load().xgrammar.struct
    real = binding.call
    ctypes.c_void_p.in_dll(library, "real_call").value = real
    binding.call = ctypes.cast(library.timed_call, ctypes.c_void_p).value
    try:
        yield LibraryCalls(ctypes.c_int64.in_dll(library, "spent_ns"))
    finally:
        binding.call = real
