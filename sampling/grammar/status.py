"""The numbers that a matcher's host node and the device exchange: mask statuses, tags, and columns of the row table."""

from __future__ import annotations

from enum import IntEnum

TAG_FIELDS = 4  # owner, committed tokens, index, MaskStatus
ROW_RUNNING = 1


class HostColumn(IntEnum):
    """The columns of the device's row table that host nodes read; its leading columns."""

    OWNER = 0  # serial of the request
    GENERATED = 1  # generated tokens
    LAST_TOKEN = 2
    ACCEPTED = 3  # drafts that the latest round accepted
    FINISH = 4  # ROW_RUNNING while the row runs


class MaskStatus(IntEnum):
    """The state of a mask row. Only from an OK row may a token be sampled."""

    NONE = 0  # never filled, or tagged for another row
    OK = 1  # a token other than a stop token is legal
    COMPLETE = 2  # the text is complete; only a stop token is legal
    TERMINATED = 3  # a stop token was accepted; no token is legal
    DEAD_END = 4  # no token is legal, and the text is not complete
    ILLEGAL = 5  # the draft before this row was not accepted; set by the host link
    FAULT = 6  # the grammar library failed; the matcher can no longer be used
