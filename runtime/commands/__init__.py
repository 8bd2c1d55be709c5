"""What the `stepgraph` command does, one module per word: `add` states its flags, `run` imports torch and does it."""
