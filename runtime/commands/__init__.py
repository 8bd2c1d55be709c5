"""The commands of `stepgraph`, one module each: `run` runs it; `flags` declares the flags of all."""
