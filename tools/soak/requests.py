"""Random requests, most with a new grammar, each with a check of its text that does not use the grammar."""

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
from tools.soak.engines import MAX_LENGTH, VOCABULARY, EngineKind

NUM_TOKENS = len(VOCABULARY.tokens)
NUM_LETTERS = 95  # the first ids are printable ASCII
_draws = random.Random("stems")
SHARED_PREFIXES = tuple(tuple(_draws.choices(range(NUM_LETTERS), k=length)) for length in (8, 16, 24, 40, 70))  # shared prompt prefixes
Validator = Callable[[str], bool]  # checks a complete text without a matcher


@dataclass(frozen=True)
class Request:
    """Arguments of one submit() and a check of its result."""

    prompt: tuple[int, ...]
    constraint: Constraint | None
    is_valid: Validator | None
    sampling: SamplingParams
    max_new_tokens: int
    drafts: int | None = None
    draft_ids: tuple[int, ...] = ()
    salt: str = ""
    uncompilable: bool = False  # the grammar must be refused

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of submit()."""
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

    def run_alone(self, engine: Engine) -> Job:
        """Run it on an idle engine without drafts."""
        job = replace(self, drafts=0, draft_ids=()).submit(engine)
        for _ in engine.stream():
            pass
        return job


class RequestSource:
    """Draws requests for engines of one kind. `numbers` makes their grammars unique."""

    def __init__(self, kind: EngineKind, seed: str, numbers: itertools.count[int]) -> None:
        self.kind, self.random, self._numbers = kind, random.Random(seed), numbers

    def draw(self) -> Request:
        rng = self.random
        prefix = rng.choice((*SHARED_PREFIXES, ()))
        prompt = (*prefix, *rng.choices(range(NUM_TOKENS), k=rng.choice((1, 1, 2, 5, 9, 20))))
        constraint, is_valid, uncompilable = self._constraint() if rng.random() < 0.65 else (None, None, False)
        room = MAX_LENGTH - len(prompt)
        new_tokens = min(room, rng.choice((1, 3, 8, 8, 16, 16, 24, 40, room)))
        drafts = min(rng.choice((0, 1, self.kind.drafts)), self.kind.drafts) if rng.random() < 0.3 else None
        ids = tuple(rng.choices(range(NUM_LETTERS), k=12)) if self.kind.takes_draft_ids and drafts != 0 and rng.random() < 0.3 else ()
        sampling = self._sampling(new_tokens, constraint)
        return Request(prompt, constraint, is_valid, sampling, new_tokens, drafts, ids, rng.choice(("", "", "", "other")), uncompilable)

    def _sampling(self, new_tokens: int, constraint: Constraint | None) -> SamplingParams:
        rng, sampling = self.random, GREEDY
        if rng.random() < 0.4:
            temperature, seed = rng.choice((0.5, 1.0, 1.5)), rng.choice((None, rng.getrandbits(40), rng.getrandbits(40)))
            top_p, top_k, min_p = rng.choice((1.0, 0.8)), rng.choice((0, 20)), rng.choice((0.0, 0.05))
            sampling = replace(sampling, temperature=temperature, seed=seed, top_p=top_p, top_k=top_k, min_p=min_p)
        if rng.random() < 0.3 and self.kind.target == "toy":  # integer logits: penalties cause no near ties
            bad, biases = tuple(rng.sample(range(NUM_LETTERS), 2)), {rng.randrange(NUM_LETTERS): rng.uniform(-4, 4) for _ in range(3)}
            sampling = replace(sampling, repetition_penalty=1.3, presence_penalty=0.5, bad_token_ids=bad, logit_bias=biases)
        if rng.random() < 0.2:
            sampling = replace(sampling, logprobs=True, min_new_tokens=min(2, new_tokens))
        if rng.random() < 0.2 and constraint is None:
            sampling = replace(sampling, ignore_eos=True)
        return sampling

    def _constraint(self) -> tuple[Constraint, Validator | None, bool]:
        rng, number = self.random, next(self._numbers)
        names = ("schema", "regex", "choice", "lark", "tag", "after", "object", "fixed", "ebnf", "uncompilable")
        accepts_ebnf = self.kind.grammars == "auto"  # the last two kinds are in its notation
        kind = rng.choices(names, (8, 4, 3, 2, 1, 1, 1, 2, 2 * accepts_ebnf, accepts_ebnf))[0]
        case: tuple[Constraint, Validator | None] = getattr(self, f"_{kind}")(number)
        return (*case, kind == "uncompilable")

    def _schema(self, number: int) -> tuple[Constraint, Validator]:
        values = ({"type": "integer"}, {"type": "boolean"}, {"enum": [f"v{number}", "w"]}, {"type": "array", "items": {"type": "null"}})
        names = [f"p{number}_{index}" for index in range(self.random.randint(1, 4))]
        properties = {name: self.random.choice(values) for name in names}
        schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
        return Constraint.json_schema(schema), lambda text: list(json.loads(text)) == names

    def _fixed(self, number: int) -> tuple[Constraint, Validator]:
        """Always the same schema: a cache hit, unless it was evicted."""
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
        return Constraint.response_format({"type": "json_schema", "json_schema": {"name": "fixed", "schema": schema}}), _is_ok  # type: ignore[return-value]

    def _object(self, number: int) -> tuple[Constraint, Validator]:
        return Constraint.json_object(), lambda text: isinstance(json.loads(text), dict)

    def _regex(self, number: int) -> tuple[Constraint, Validator]:
        pattern = f"{number}-[a-z]{{2,{number % 7 + 3}}}(x|yy)?"
        return Constraint.regex(pattern), lambda text: re.fullmatch(pattern, text) is not None

    def _after(self, number: int) -> tuple[Constraint, Validator]:
        """A constraint after the first "e"."""
        pattern = f"[0-9]{{1,3}};{number}"
        return Constraint.regex(pattern).after("e"), lambda text: re.fullmatch(pattern, text.partition("e")[2]) is not None

    def _choice(self, number: int) -> tuple[Constraint, Validator]:
        options = [f"answer {number}", f"answer {number}!", "neither", f"{number}"]
        return Constraint.choice(options), lambda text: text in options

    def _ebnf(self, number: int) -> tuple[Constraint, Validator]:
        grammar = f'root ::= "{number}" body\nbody ::= "(" body ")" | [a-f] [0-9]?'
        return Constraint.ebnf(grammar), lambda text: re.fullmatch(rf"{number}\(*[a-f][0-9]?\)*", text) is not None

    def _lark(self, number: int) -> tuple[Constraint, Validator]:
        return Constraint.lark(f'start: "n{number}" ("," /[a-c]+/)*'), lambda text: re.fullmatch(rf"n{number}(,[a-c]+)*", text) is not None

    def _tag(self, number: int) -> tuple[Constraint, None]:
        structure = {"begin": f"e{number}", "schema": {"type": "integer"}, "end": "!"}
        return Constraint.structural_tag({"triggers": ["e"], "structures": [structure]}), None

    def _uncompilable(self, number: int) -> tuple[Constraint, None]:
        return Constraint.json_schema({"type": "integer", "minimum": number + 1, "maximum": number}), None  # found at compile


def _is_ok(text: str) -> bool:
    return list(json.loads(text)) == ["ok"]
