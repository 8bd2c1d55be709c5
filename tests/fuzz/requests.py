"""Fuzzing of requests: sampling fields, uncompiled constraints, and whole submits."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from stepgraph import Constraint, Engine, EngineConfig, FinishReason, LogitsProcessor, ProcessorInput, QueueFullError, SamplingParams
from stepgraph.graphs import TapeBackend
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.sampling.grammar import GrammarCompiler, GrammarLimits, Vocabulary
from stepgraph.sampling.grammar.compile.limits import MIB
from tests.fuzz.loop import Door
from tests.fuzz.values import Value, built, form, written
from tests.helpers.families import folder_of
from tests.helpers.grammar_texts import PERSON, TAGS

LIMITS = GrammarLimits(
    max_chars=4000,
    max_schema_chars=4000,
    max_nesting=50,
    compile_seconds=0.5,
    compile_bytes=128 * MIB,
    result_bytes=4 * MIB,
    step_seconds=2.0,
)
WORKER = frozenset({"subprocess.Popen", "open", "tempfile.mkstemp", "os.posix_spawn", "os.remove", "tempfile.mkdtemp", "ctypes.dlopen"})
SAMPLING: dict[str, Value] = {
    "temperature": 0.7,
    "min_p": 0.1,
    "top_k": 20,
    "top_p": 0.9,
    "seed": 5,
    "stop_token_ids": [7],
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": form("pairs", [[5, 2.0], [6, -1.0]]),
    "bad_token_ids": [9],
    "min_new_tokens": 1,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 2,
    "prompt_logprobs": 1,
    "stop": ["ab", "c"],
    "bad_words": [[4, 5], [6]],
    "logits_processors": {"sharpen": [2.0]},
}
RELAXED: dict[str, Value] = {"relaxed_top_n": 2, "relaxed_delta": 0.5}  # of greedy requests
FIELDS_OF_SAMPLING = {*SAMPLING, *RELAXED}
CONSTRAINTS: list[tuple[str, list[Value]]] = [
    ("json_schema", [PERSON]),
    ("json_schema", ['{"type": "integer"}', True, "llguidance"]),
    ("json_object", [False, "xgrammar"]),
    ("response_format", [{"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}, "strict": True}}]),
    ("regex", ["[a-c]{1,3}", "auto"]),
    ("choice", [["yes", "no"], "auto"]),
    ("ebnf", ['start ::= "a" | "(" start ")"', "start"]),
    ("lark", ['start: "a" | "(" start ")"']),
    ("structural_tag", [TAGS, False, "auto"]),
    ("after", ["</think>"]),
    ("after", [[3, 4]]),
]


def sharpened(logits: Tensor, given: ProcessorInput) -> Tensor:
    return logits * given.arguments[:, None]  # one factor per row


CONFIG = EngineConfig(
    max_rows=2,
    num_speculative_tokens=2,
    draft_length=2,
    max_length=48,
    page_size=8,
    buckets=(2,),
    eager=True,
    rounds_in_flight=1,
    backend="tape",
    max_top_logprobs=2,
    max_bad_words=4,
    relaxed_acceptance=True,
    logits_processors=(LogitsProcessor("sharpen", sharpened, 1),),
    grammar_limits=LIMITS,
    max_compiles=1,
    grammar_cache_bytes=1 << 20,
)


class SamplingDoor(Door):
    """SamplingParams(**fields)."""

    name = "sampling"
    seeds: Sequence[Value] = [{}, SAMPLING, RELAXED, {"bad_words": ["ab", [4, 5]]}, *({name: value} for name, value in SAMPLING.items())]
    words: Sequence[str] = [*SAMPLING, *RELAXED]
    hostile = True
    named = re.compile(r"SamplingParams\.\w+(\[[^]]{1,150}\]){0,2}: got ")

    def enter(self, given: Value) -> None:
        arguments = {name: built(value) for name, value in given.items() if name in FIELDS_OF_SAMPLING} if isinstance(given, dict) else {}
        accepted = SamplingParams(**arguments)
        again = replace(accepted)
        assert again == accepted and hash(again) == hash(accepted), "a copy of the accepted parameters differs"
        assert accepted.plain == (accepted.beyond_argmax == "") and set(accepted.biases) == {*accepted.logit_bias, *accepted.bad_token_ids}
        numbers = [value for field in fields(accepted) if isinstance(value := getattr(accepted, field.name), float)]
        assert all(map(math.isfinite, [*numbers, *accepted.logit_bias.values()])), "a number that is not finite was accepted"


class ConstraintDoor(Door):
    """The constructors of Constraint, and the checks that need no compile."""

    name = "constraint"
    seeds: Sequence[Value] = [
        *({"make": make, "with": arguments} for make, arguments in CONSTRAINTS),
        *(
            {"make": "", "with": [kind, payload, False, "auto", marker]}
            for kind, payload, marker in [
                ("choice", '["a"]', None),
                ("ebnf", '["root", "root ::= \\"a\\""]', "x"),
                ("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "<a", "schema": {}, "end": ""}]}', form("tuple", [3])),
                ("json_schema", "{}", None),
            ]
        ),
    ]
    words: Sequence[str] = [
        *{make for make, _ in CONSTRAINTS},
        *"type schema name strict triggers structures begin end properties json_schema".split(),
        "with",
        "make",
        "xgrammar",
        "llguidance",
        "root",
        "start",
    ]
    hostile = True
    named = re.compile(r"(Constraint\.\w+|response_format|constraint \w+: cannot be compiled: )")

    def __init__(self) -> None:
        self._compiler = GrammarCompiler(Vocabulary.printable(), limits=LIMITS, isolation="none")

    def enter(self, given: Value) -> None:
        constraint = constraint_of(given)
        if constraint is not None:
            hash(constraint)
            self._compiler.check(constraint)

    def close(self) -> None:
        self._compiler.close()


def constraint_of(given: Value) -> Constraint | None:
    """The constraint that `given` describes; None where it is not a valid constructor call."""
    make, arguments = (given.get("make"), given.get("with")) if isinstance(given, dict) else (None, None)
    if not isinstance(make, str) or not isinstance(arguments, list):
        return None
    makers = {name: getattr(Constraint, name) for name, _ in CONSTRAINTS if name != "after"}
    maker: Callable[..., Any] | None = (makers | {"": Constraint, "after": Constraint.json_object().after}).get(make)
    most = {"": 5, "json_object": 2, "ebnf": 2, "lark": 1, "regex": 2, "choice": 2, "after": 1}.get(make, 3)
    least = {"": 2, "json_object": 0}.get(make, 1)
    if maker is None or not least <= len(arguments) <= most:
        return None
    found: Constraint | None = maker(*map(built, arguments))
    return found


FIELDS = (
    "prompt max_new_tokens num_speculative_tokens draft_ids cache_salt lora_name prompt_embeddings resume_from priority tenant sampling"
    " constraint timeout_seconds".split()
)


class SubmitDoor(Door):
    """Engine.submit with any fields. Some accepted requests, chosen by hash, decode a few rounds; the rest are cancelled at once."""

    name = "submit"
    words: Sequence[str] = [*SAMPLING, *RELAXED, *FIELDS, *{make for make, _ in CONSTRAINTS}, "make", "with"]
    hostile, allowed = True, WORKER
    named = re.compile(
        r"((SamplingParams|Constraint)\.\w+|sampling\b|response_format|constraint\b|prompt\b|Engine\.tokenizer|max_new_tokens|num_speculative_tokens"
        r"|draft_ids|cache_salt|lora_name|prompt_embeddings|resume_from|priority|tenant|timeout_seconds)"
    )
    rounds = 4

    def __init__(self, thorough: bool = False) -> None:
        self._thorough = thorough
        target = open_checkpoint(folder_of("smollm2"))
        self._engine = Engine(target.load("cpu"), NgramLookup(), vocabulary=target.vocabulary, config=CONFIG, backend=TapeBackend())
        self._engine.capture()
        row = [0.5] * 48
        whole: dict[str, Value] = {
            "prompt": [1, 5, 9],
            "resume_from": [7],
            "max_new_tokens": 3,
            "num_speculative_tokens": 2,
            "draft_ids": [5, 6],
            "cache_salt": "a",
            "priority": 1,
            "tenant": "b",
            "timeout_seconds": 60,
        }
        constraints = [{"make": make, "with": arguments} for make, arguments in CONSTRAINTS]
        self.seeds: Sequence[Value] = [
            whole,
            {"prompt": form("tensor", [1, 2], type="int64"), "sampling": SAMPLING | {"ignore_eos": False}},
            {"prompt": form("array", [1, 2]), "sampling": {"temperature": 0, "logprobs": True}},
            {"prompt": [1, 2], "sampling": RELAXED, "max_new_tokens": 4},
            {"prompt": [5] * 30, "prompt_embeddings": form("pairs", [[0, form("tensor", [row])], [4, form("tensor", [row, row])]])},
            *(whole | {"constraint": constraint} for constraint in constraints),
            *({"prompt": [4], "max_new_tokens": 2, "sampling": {name: value}} for name, value in SAMPLING.items()),
        ]

    def enter(self, given: Value) -> None:
        engine, before = self._engine, self._engine.stats()
        try:
            job = engine.submit(**_arguments(given))
        except (ValueError, QueueFullError):
            after = engine.stats()
            assert after.submitted == before.submitted and not engine.has_work, "a refusal changed the engine"
            raise
        run = self._thorough or zlib.crc32(written(given).encode()) % 64 == 0
        tokens: list[int] = []
        for _ in range(self.rounds * run):
            tokens += [token for event in engine.step() for token in event.tokens]
            if job.finished:
                break
        engine.cancel(job)
        while engine.has_work:
            tokens += [token for event in engine.step() for token in event.tokens]
        after = engine.stats()
        assert job.finish_reason is not None and tokens == job.tokens, "the events differ from the tokens of the job"
        assert after.submitted == before.submitted + 1 and after.running == after.waiting == 0
        assert len(job.logprobs) == (len(tokens) if job.sampling.logprobs else 0) and len(tokens) <= job.max_new_tokens
        assert len(job.prompt_logprobs) == (len(job.prompt_ids) if job.rounds and job.sampling.prompt_logprobs is not None else 0)
        if job.finish_reason == FinishReason.ERROR:
            assert (job.constraint is not None and self.named.match(job.error)) or "GrammarLimits." in job.error, f"error {job.error!r}"

    def close(self) -> None:
        self._engine.close()


def _arguments(given: Value) -> dict[str, Any]:
    """Arguments of Engine.submit; sampling parameters and constraints are built from their fields."""
    arguments = {name: built(value) for name, value in given.items() if name in FIELDS} if isinstance(given, dict) else {}
    arguments.setdefault("prompt", [1])
    sampling, constraint = arguments.get("sampling"), arguments.get("constraint")
    if isinstance(sampling, dict) and sampling.keys() <= FIELDS_OF_SAMPLING:
        arguments["sampling"] = SamplingParams(**sampling)
    if isinstance(constraint, dict):
        arguments["constraint"] = constraint_of(given["constraint"])
    return arguments
