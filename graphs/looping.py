"""Whether a launch runs another round, which the device decides with `Limits.loops`.

The host reads a slot of the results ring when its header has the number of the round it expects, and controls running launches by three
integers that it may write at any time.
"""

from __future__ import annotations

from torch import Tensor

from stepgraph.graphs.round_specs import Control, Counter
from stepgraph.graphs.row_layout import ResultLayout
from stepgraph.sampling.grammar.status import FinishCode
from stepgraph.sampling.kernels.operation import Contiguous, operation

FINISH = ResultLayout(0).columns["finish"].start  # the column is the same for any number of drafts


@operation(lambda *_: None, writes=("done", "headers"), triton=True, mapped=True)
def end_round(
    results: Contiguous, rows: Contiguous, control: Tensor, counters: Tensor, done: Tensor, headers: Tensor, dummy_row: int, capacity: int
) -> None:
    """Write the header of the slot that was published, and to `done` whether the launch ends.

    results [B, width] int64; rows [B] int64; counters [Counter] int64; done [1] int32. In pinned memory: control [Control] int64; headers
    [S, Counter] int64.
    """
    live = results[:, FINISH] == FinishCode.RUNNING
    finished = (~live & (rows != dummy_row)).any() & (control[Control.WAITING] != 0)
    stopped = counters[Counter.LAUNCH] < control[Control.STOP_BEFORE]
    full = counters[Counter.PUBLISHED] - control[Control.READ] >= capacity
    done.copy_(~live.any() | finished | stopped | full)
    headers.index_copy_(0, (counters[Counter.PUBLISHED :] - 1) % len(headers), counters[None])
