"""The rows of a round as FlashInfer reads them: where the queries and pages of each request begin. On the device, of a fixed size.

Every row is two requests, its live queries and its inert ones, so that no query and no page has to move: the second begins where
the first ends. The plan contains only the first, at its maximum length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs.model_call import ModelInput

INDEX = torch.int32


class RowTables:
    """Initially every query is live and every page full. Request 2b has the live queries of row b, 2b + 1 the inert ones."""

    def __init__(self, device: torch.device, batch: int, count: int, pages: int, page_size: int) -> None:
        self.qo_indptr = _indptr(batch, count, device)  # [2B + 1]
        self.kv_indptr = _indptr(batch, pages, device)  # [2B + 1], in pages
        self.pages = torch.zeros(batch * pages, dtype=INDEX, device=device)
        self._query_numbers = torch.arange(1, count + 1, dtype=INDEX, device=device)
        self.last_page = torch.full((2 * batch,), page_size, dtype=INDEX, device=device)  # entries in the last page of each request

    def write(self, inputs: ModelInput) -> None:
        """Lengths and pages of these rows, in place. A row without a live position has neither queries nor keys.

        All queries up to the last live one count as live: the first of a prompt may be shared, and then has no slot of its own.
        """
        page_size = inputs.page_size
        live = inputs.slots >= page_size
        last = torch.where(live, inputs.positions, -1).amax(1)
        self.qo_indptr[1::2].copy_(self.qo_indptr[:-1:2] + torch.where(live, self._query_numbers, 0).amax(1))
        self.kv_indptr[1::2].copy_(self.kv_indptr[:-1:2] + last // page_size + 1)
        self.last_page[::2].copy_(last % page_size + 1)
        self.pages.copy_(inputs.block_tables.flatten())


def _indptr(batch: int, size: int, device: torch.device) -> Tensor:
    """0, size, size, 2 * size, 2 * size, ..."""
    return (torch.arange(2 * batch + 1, device=device) + 1).div(2, rounding_mode="floor").mul(size).to(INDEX)
