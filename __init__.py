"""stepgraph: a decoding runtime for PyTorch that records a whole speculative round once and replays it."""

__version__ = "0.1.0"
