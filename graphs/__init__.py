"""How a step becomes a graph: capture and replay on CUDA or on the tape, static buffers, keys, and the decode round."""

from stepgraph.graphs.backends import capture, make_backend, run_eager
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Recorded
from stepgraph.graphs.context import current_context
from stepgraph.graphs.errors import CaptureError, HostNodeError, StepError
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.graph_set import CaptureReport
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.spans import RecordedReport
from stepgraph.graphs.tape.backend import TapeBackend

__all__ = [
    "Backend",
    "BufferSpec",
    "CaptureError",
    "CaptureReport",
    "GraphKey",
    "HostNodeError",
    "Limits",
    "Recorded",
    "RecordedReport",
    "StaticBuffers",
    "StepError",
    "TapeBackend",
    "capture",
    "current_context",
    "make_backend",
    "run_eager",
]
