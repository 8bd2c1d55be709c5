"""`python -m stepgraph`: the `stepgraph` command."""

import sys

from stepgraph.runtime.cli import main

sys.exit(main())
