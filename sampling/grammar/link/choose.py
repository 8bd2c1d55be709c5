"""The host link of an engine: the native one, or the Python one and the reason."""

from __future__ import annotations

import warnings

from torch import Tensor

from stepgraph.sampling.grammar.link.native import NativeLink, load
from stepgraph.sampling.grammar.link.protocol import HostLink
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.forced import Forcing
from stepgraph.sampling.native import Unavailable

HOST_LINKS = ("auto", "native", "python")
_warned: set[str] = set()


def open_host_link(
    choice: str,
    state_host: Tensor,
    drafts_host: Tensor,
    masks_host: Tensor,
    tags_host: Tensor,
    depth: int,
    forcing: Forcing | None = None,
    check_masks: bool = False,
    contents_host: Tensor | None = None,
) -> HostLink:
    """The host link for `EngineConfig.host_link`. With `auto` it is the native one if available, else the Python one and a warning.

    `depth`: maximum number of rounds that are pushed and not ended. `forcing`: where forced tokens are written; None: they are not
    searched. `contents_host`: as for NativeLink. `check_masks`: masks are compared in Python, so the link is the Python one. ValueError
    for an unknown choice; RuntimeError if `native` is not available.
    """
    if choice not in HOST_LINKS:
        raise ValueError(f"host_link: got {choice!r}, expected one of {', '.join(HOST_LINKS)}")
    reason = "check_masks compares masks in Python" if check_masks else ""
    if choice != "python" and not check_masks:
        try:
            return NativeLink(load(), state_host, drafts_host, masks_host, tags_host, depth, forcing=forcing, contents_host=contents_host)
        except Unavailable as error:
            if choice == "native":
                raise RuntimeError(f"host_link 'native': {error}") from error
            reason = f"no native link, {error}"
            _warn_once(f"stepgraph: grammars are driven from Python, under the GIL: {reason}")
    return PythonLink(state_host, drafts_host, masks_host, tags_host, reason, forcing)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=6)  # at the caller of Engine(...), which is wrapped once
