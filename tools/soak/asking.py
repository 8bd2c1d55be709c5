"""What a soak asks for: requests drawn one by one, most of their grammars never seen before, each with what its text must look like."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stepgraph import Constraint, Engine, Job, SamplingParams
from stepgraph.sampling.params import GREEDY
from tools.soak.kinds import MAX_LENGTH, VOCABULARY, Kind

TOKENS = len(VOCABULARY.tokens)
LETTERS = 95  # ids in front: printable ASCII
_draws = random.Random("stems")
STEMS = tuple(tuple(_draws.choices(range(LETTERS), k=length)) for length in (8, 16, 24, 40, 70))  # what many prompts begin with
Reads = Callable[[str], bool]  # a complete text: is it what was asked for? By other means than the grammar's


@dataclass(frozen=True)
class Ask:
    """A request."""

    prompt: tuple[int, ...]
    constraint: Constraint | None
    reads: Reads | None
    sampling: SamplingParams
    max_new_tokens: int
    drafts: int | None = None
    draft_ids: tuple[int, ...] = ()
    salt: str = ""
    doomed: bool = False  # its grammar cannot be compiled

    @property
    def options(self) -> dict[str, Any]:
        """As submit() takes them."""
        return {
            "constraint": self.constraint,
            "sampling": self.sampling,
            "max_new_tokens": self.max_new_tokens,
            "num_speculative_tokens": self.drafts,
            "draft_ids": self.draft_ids or None,
            "cache_salt": self.salt,
        }

    def submit(self, engine: Engine) -> Job:
        return engine.submit(self.prompt, **self.options)

    def alone(self, engine: Engine) -> Job:
        """Asked of an engine that drafts nothing and has nothing else to do."""
        job = replace(self, drafts=0, draft_ids=()).submit(engine)
        for _ in engine.stream():
            pass
        return job


class Asks:
    """Draws requests for engines of one kind. `numbers` makes grammars that no other has."""

    def __init__(self, kind: Kind, seed: str, numbers: itertools.count[int]) -> None:
        self.kind, self.random, self._numbers = kind, random.Random(seed), numbers

    def draw(self) -> Ask:
        drawn = self.random
        stem = drawn.choice((*STEMS, ()))
        prompt = (*stem, *drawn.choices(range(TOKENS), k=drawn.choice((1, 1, 2, 5, 9, 20))))
        constraint, reads, doomed = self._constraint() if drawn.random() < 0.65 else (None, None, False)
        most = MAX_LENGTH - len(prompt)
        new_tokens = min(most, drawn.choice((1, 3, 8, 8, 16, 16, 24, 40, most)))
        drafts = min(drawn.choice((0, 1, self.kind.k)), self.kind.k) if drawn.random() < 0.3 else None
        given = tuple(drawn.choices(range(LETTERS), k=12)) if self.kind.reads_text and drafts != 0 and drawn.random() < 0.3 else ()
        sampling = self._sampling(new_tokens, constraint)
        return Ask(prompt, constraint, reads, sampling, new_tokens, drafts, given, drawn.choice(("", "", "", "other")), doomed)

    def _sampling(self, new_tokens: int, constraint: Constraint | None) -> SamplingParams:
        drawn, sampling = self.random, GREEDY
        if drawn.random() < 0.4:
            temperature, seed = drawn.choice((0.5, 1.0, 1.5)), drawn.choice((None, drawn.getrandbits(40), drawn.getrandbits(40)))
            top_p, top_k, min_p = drawn.choice((1.0, 0.8)), drawn.choice((0, 20)), drawn.choice((0.0, 0.05))
            sampling = replace(sampling, temperature=temperature, seed=seed, top_p=top_p, top_k=top_k, min_p=min_p)
        if drawn.random() < 0.3 and self.kind.law == "toy":  # whole numbers as logits: penalties make no near ties
            bad, biases = tuple(drawn.sample(range(LETTERS), 2)), {drawn.randrange(LETTERS): drawn.uniform(-4, 4) for _ in range(3)}
            sampling = replace(sampling, repetition_penalty=1.3, presence_penalty=0.5, bad_token_ids=bad, logit_bias=biases)
        if drawn.random() < 0.2:
            sampling = replace(sampling, logprobs=True, min_new_tokens=min(2, new_tokens))
        if drawn.random() < 0.2 and constraint is None:
            sampling = replace(sampling, ignore_eos=True)
        return sampling

    def _constraint(self) -> tuple[Constraint, Reads | None, bool]:
        drawn, number = self.random, next(self._numbers)
        names = ("schema", "regex", "choice", "lark", "tag", "after", "object", "fixed", "ebnf", "doomed")
        of_xgrammar = self.kind.grammars == "auto"  # the last two are in its notation
        kind = drawn.choices(names, (8, 4, 3, 2, 1, 1, 1, 2, 2 * of_xgrammar, of_xgrammar))[0]
        made: tuple[Constraint, Reads | None] = getattr(self, f"_{kind}")(number)
        return (*made, kind == "doomed")

    def _schema(self, number: int) -> tuple[Constraint, Reads]:
        values = ({"type": "integer"}, {"type": "boolean"}, {"enum": [f"v{number}", "w"]}, {"type": "array", "items": {"type": "null"}})
        names = [f"p{number}_{place}" for place in range(self.random.randint(1, 4))]
        properties = {name: self.random.choice(values) for name in names}
        schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        return Constraint.json_schema(schema), lambda text: list(json.loads(text)) == names

    def _fixed(self, number: int) -> tuple[Constraint, Reads]:
        """The same again and again: found in the cache, unless it was dropped meanwhile."""
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
        return Constraint.response_format({"type": "json_schema", "json_schema": {"name": "fixed", "schema": schema}}), _is_ok  # type: ignore[return-value]

    def _object(self, number: int) -> tuple[Constraint, Reads]:
        return Constraint.json_object(), lambda text: isinstance(json.loads(text), dict)

    def _regex(self, number: int) -> tuple[Constraint, Reads]:
        pattern = f"{number}-[a-z]{{2,{number % 7 + 3}}}(x|yy)?"
        return Constraint.regex(pattern), lambda text: re.fullmatch(pattern, text) is not None

    def _after(self, number: int) -> tuple[Constraint, Reads]:
        """From the first "e" on."""
        pattern = f"[0-9]{{1,3}};{number}"
        return Constraint.regex(pattern).after("e"), lambda text: re.fullmatch(pattern, text.partition("e")[2]) is not None

    def _choice(self, number: int) -> tuple[Constraint, Reads]:
        options = [f"answer {number}", f"answer {number}!", "neither", f"{number}"]
        return Constraint.choice(options), lambda text: text in options

    def _ebnf(self, number: int) -> tuple[Constraint, Reads]:
        grammar = f'root ::= "{number}" body\nbody ::= "(" body ")" | [a-f] [0-9]?'
        return Constraint.ebnf(grammar), lambda text: re.fullmatch(rf"{number}\(*[a-f][0-9]?\)*", text) is not None

    def _lark(self, number: int) -> tuple[Constraint, Reads]:
        return Constraint.lark(f'start: "n{number}" ("," /[a-c]+/)*'), lambda text: re.fullmatch(rf"n{number}(,[a-c]+)*", text) is not None

    def _tag(self, number: int) -> tuple[Constraint, None]:
        structure = {"begin": f"e{number}", "schema": {"type": "integer"}, "end": "!"}
        return Constraint.structural_tag({"triggers": ["e"], "structures": [structure]}), None

    def _doomed(self, number: int) -> tuple[Constraint, None]:
        return Constraint.ebnf(f"root ::= nowhere{number}"), None


def _is_ok(text: str) -> bool:
    return list(json.loads(text)) == ["ok"]
