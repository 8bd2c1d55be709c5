"""What a replica and its callers send each other. Needs no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from stepgraph.runtime.request import FinishReason, TokenLogprob
from stepgraph.sampling.grammar.vocabulary import Vocabulary


@dataclass(frozen=True)
class Ask:
    """A request, or the rest of one."""

    prompt_ids: tuple[int, ...]
    options: dict[str, Any]  # of Engine.submit()
    pages: tuple[bytes, ...] = ()  # hashes of the prompt's pages
    avoid: frozenset[str] = frozenset()  # replicas that could not serve it
    identity: str = ""  # only a replica with this one may answer; empty: any


class Refused(NamedTuple):
    """The replica has not accepted it, or its engine has failed."""

    replica: str
    why: str  # value: the request is wrong; full: too many wait; identity: not the one of the request; failed: the engine
    message: str


class Tokens(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class End(NamedTuple):
    """The last tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    error: str
    rounds: int
    num_cached_tokens: int


class Opened(NamedTuple):
    """The first part of a request that the replica has accepted; one message of Ray with its first tokens."""

    replica: str
    identity: str
    part: Tokens | End


Part = Opened | Refused | Tokens | End


@dataclass(frozen=True)
class Info:
    """What callers need to know of the engine. All replicas of one deployment have the same, apart from the names and the device."""

    max_rows: int
    max_length: int
    page_size: int
    vocabulary: Vocabulary | None
    lora_names: tuple[str, ...]
    num_drafts: int  # most drafts of a round
    fixed_drafts: bool  # a request that runs again has the same ones, at any load
    exact: bool  # the target's results depend on no sizes of batches and chunks
    identity: str  # replicas with equal ones compute the same bits
    replica: str
    device: str
    process: int  # its number on its machine
