"""The numbers that cross between a matcher's host node and the device: statuses, tags, and what a node is shown of a row."""

from __future__ import annotations

from enum import IntEnum

TAG_FIELDS = 4  # owner, committed tokens, index, MaskStatus
ROW_RUNNING = 1


class HostColumn(IntEnum):
    """What a host node is shown of a row; the leading columns of the device's row table."""

    OWNER = 0  # serial of the request
    GENERATED = 1  # tokens of its history after the prompt
    LAST_TOKEN = 2
    ACCEPTED = 3  # how many drafts the latest round accepted
    FINISH = 4  # ROW_RUNNING while the row runs


class MaskStatus(IntEnum):
    """What a mask row means. Only an OK row may be sampled from."""

    NONE = 0  # never filled, or the tag is another row's
    OK = 1  # some token is legal besides a stop token
    COMPLETE = 2  # the text is complete and only a stop token may follow
    TERMINATED = 3  # a stop token was accepted; nothing follows
    DEAD_END = 4  # no token may follow, and the text is not complete
    ILLEGAL = 5  # the draft in front of this row was not accepted; set by the host link
    FAULT = 6  # the grammar library failed; the matcher is of no further use
