"""What a CUDA backend holds on its device: streams, events, a memory pool, and recordings that may still be running."""

from __future__ import annotations

import contextlib
import functools

import torch

from stepgraph.graphs.context import MAIN
from stepgraph.graphs.cuda.driver import Driver, EventPool
from stepgraph.graphs.cuda.recorder import Recording
from stepgraph.sampling.cuda_graphs import GraphPool, Streams, driver_library, take_capture_stream


class DeviceResources:
    """Outlives its backend until the device is idle."""

    def __init__(self, device: torch.device) -> None:
        self.driver: Driver = open_driver()
        self.context = self.driver.context()
        self.streams, self.capture_streams = Streams(device), Streams(device, take_capture_stream)
        self.pool = GraphPool(self.capture_streams[MAIN])
        self.retired: list[Recording] = []  # recordings without references that may still be running
        self.events = EventPool(device, self.driver)
        self.order_event = self.events.take()

    def free_retired(self) -> None:
        """Free the retired recordings. The device must be idle."""
        while self.retired:
            self.retired.pop().free()

    def release(self) -> None:
        with contextlib.suppress(RuntimeError):  # after a device error nothing runs
            if not self.driver.context():  # a finalizer may run on any thread
                self.driver.cuCtxSetCurrent(self.context)
            for stream in self.streams.values():
                self.driver.cuStreamSynchronize(stream.cuda_stream)
        self.free_retired()
        self.pool.release()
        self.events.give(self.order_event)
        self.events.release()
        self.streams.release()
        self.capture_streams.release()


@functools.cache
def open_driver() -> Driver:
    """The CUDA driver; RuntimeError if there is none."""
    try:
        library = driver_library()
    except OSError as error:
        raise RuntimeError(f"no NVIDIA driver: {error}; use backend 'tape' on the CPU") from error
    return Driver(library)


def current_device() -> torch.device:
    """The current CUDA device; RuntimeError if there is none."""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise RuntimeError(f"backend 'cuda': torch {torch.__version__}, {built}, has no CUDA device; use backend 'tape' on the CPU")
    return torch.device("cuda", torch.cuda.current_device())
