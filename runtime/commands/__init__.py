"""The commands of `stepgraph`, one module each: `add` declares the flags, `run` imports torch and runs the command."""
