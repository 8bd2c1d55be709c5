"""The commands and their flags: what --help prints, and the checks that need no model. Nothing here imports torch.

ValueErrors have the form `--flag: got VALUE, expected ACCEPTED`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.runtime.commands.inputs import open_listener, parse_token_ids, read_file, read_schema, require_writable
from stepgraph.runtime.demo.pair import DRAFTS
from stepgraph.sampling.fields import check_value, clip_repr, number, whole

SAMPLING_FLAGS = {
    "temperature": (float, "0 always chooses the most likely token (default: 0, or 1 with --top-p, --top-k, --min-p or --seed)"),
    "top_p": (float, "sample from the most likely tokens with this total probability"),
    "top_k": (int, "sample from this many of the most likely tokens"),
    "min_p": (float, "drop tokens less likely than this fraction of the most likely one"),
    "seed": (int, "the same seed gives the same text"),
    "repetition_penalty": (float, "divide the logits of tokens in the prompt or answer by this"),
    "presence_penalty": (float, "subtract this from the logits of tokens in the answer"),
    "frequency_penalty": (float, "subtract this once for each occurrence in the answer"),
    "min_new_tokens": (int, "no stop token before this many tokens"),
}
DTYPES = ("bfloat16", "float16", "float32")
GRAMMAR_KINDS = {".ebnf": "ebnf", ".gbnf": "ebnf", ".lark": "lark"}  # by file suffix
TOY = "toy"
TRACE_FILE = "timeline.json"
OR_TOY = f", or {TOY} for the seeded toy pair"
LEAST_SECONDS, SECONDS_PER_DAY = 0.001, 86_400  # of time limits
STEP_EXAMPLE = """
# my_step.py
import torch
from stepgraph.graphs import BufferSpec, StaticBuffers

buffers = StaticBuffers([BufferSpec("x", (4,), torch.float32), BufferSpec("y", (4,), torch.float32)])

def step(buffers):
    buffers.y.copy_(torch.softmax(buffers.x * 2, 0))

def make():
    return step, buffers
"""


class Command(NamedTuple):
    summary: str  # one line of `stepgraph --help`
    description: str
    examples: tuple[str, ...]  # tests run them
    add_flags: Callable[[argparse.ArgumentParser], None]  # declares them
    check_flags: Callable[[argparse.Namespace], None] = lambda options: None  # raises ValueError; replaces paths of files by their contents


def add_demo_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_number(parser, "-k --drafts", DRAFTS, "drafts per round, 1 to 8", 1, 8)
    add_number(parser, "--max-new-tokens", 128, "maximum length of an answer", 2, 4096)
    add_number(parser, "--repeats", 3, "measured answers of each variant", 1, 1000)
    add_threads(parser)
    timeline = parser.add_mutually_exclusive_group()
    help_text = "the folder for the timeline (default: %(default)s)"
    timeline.add_argument("--out", type=_parse_path, default=Path("stepgraph-demo"), metavar="FOLDER", help=help_text)
    timeline.add_argument("--no-timeline", action="store_true", help="do not write a timeline")
    add(
        "--html",
        type=_parse_path,
        metavar="FILE",
        help="also write answers, table and timeline as one HTML page, without scripts or network",
    )
    add("--toy", action="store_true", help="use the toy pair: nothing to install, texts without meaning")


def check_demo(options: argparse.Namespace) -> None:
    if not options.no_timeline:
        require_writable("--out", options.out / TRACE_FILE)
    if options.html is not None:
        require_writable("--html", options.html)


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; - reads it from standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    prompt.add_argument("--token-ids", metavar="IDS", help="the prompt as ids, such as 1,2,3; needs a tokenizer library only with --after")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="use the chat template (default: if the model has one)")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt, in a chat")
    add_number(parser, "--max-new-tokens", 256, "maximum length of an answer", 1)
    add_drafts(parser)
    group = parser.add_argument_group("constraint (at most one, and --after)")
    constraint_flags = group.add_mutually_exclusive_group()
    constraint_flags.add_argument("--schema", metavar="FILE|JSON", help="a JSON schema: a file, or the schema itself")
    constraint_flags.add_argument("--regex", metavar="PATTERN", help="a regular expression for the whole text")
    constraint_flags.add_argument("--grammar", metavar="FILE", help="a grammar in GBNF (.ebnf, .gbnf) or Lark (.lark) notation")
    constraint_flags.add_argument("--choice", metavar="TEXT", action="append", help="one of several texts; repeat the flag for each")
    constraint_flags.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--after", metavar="MARKER", help="apply the constraint only after this text or control token, such as </think>")
    group = parser.add_argument_group("sampling")
    for name, (kind, help_text) in SAMPLING_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=help_text)
    help_text = "a text that ends the answer and is not part of it; repeat the flag for more"
    group.add_argument("--stop", metavar="TEXT", action="append", help=help_text)
    group.add_argument("--stop-token-ids", metavar="IDS", help="token ids that end the answer in addition to the model's own, such as 2,13")
    add_loading(parser)


def check_generate(options: argparse.Namespace) -> None:
    if options.schema is not None:
        options.schema = read_schema("--schema", options.schema)
    grammar_kind = GRAMMAR_KINDS.get(Path(options.grammar or "").suffix, "")
    if options.grammar is not None:
        if not grammar_kind:
            raise ValueError(f"--grammar: got {clip_repr(options.grammar)}, expected a file with the suffix {', '.join(GRAMMAR_KINDS)}")
        options.grammar = read_file("--grammar", options.grammar, "the path of a grammar")
    stated = {"json_schema": options.schema, "regex": options.regex, grammar_kind: options.grammar, "choice": options.choice}
    found = [(kind, (argument,)) for kind, argument in stated.items() if argument is not None]
    # The method of Constraint, and its arguments.
    options.constraint = found[0] if found else ("json_object", ()) if options.json_object else None
    if options.after is not None and options.constraint is None:
        accepted = "--schema, --regex, --grammar, --choice or --json-object with it"
        raise ValueError(f"--after: got {clip_repr(options.after)} without a constraint, expected {accepted}")
    if options.min_new_tokens is not None:
        check_value("--min-new-tokens", options.min_new_tokens, whole(0, options.max_new_tokens))
    if options.token_ids is not None and (options.chat or options.system is not None):
        raise ValueError("--token-ids: got it with --chat or --system, expected it alone: token ids are used unchanged")
    options.token_ids = parse_token_ids("--token-ids", options.token_ids)
    options.stop_token_ids = parse_token_ids("--stop-token-ids", options.stop_token_ids)


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser, OR_TOY)
    prompts = "JSON lines with text or messages, and optionally a schema (default: two built-in prompts)"
    parser.add_argument("--prompts", metavar="FILE", help=prompts)
    add_number(parser, "--repeats", 3, "answers of each variant to each prompt", 1)
    add_number(parser, "--max-new-tokens", 128, "maximum length of an answer", 2)
    add_drafts(parser)
    add_loading(parser)


def check_toy(options: argparse.Namespace) -> None:
    """ValueError for flags of models that have files."""
    accepted = {"dtype": (None,), "weights": ("dequantised",), "implementation": ("auto",), "draft": ("auto", "none")}
    for name, values in accepted.items():
        if options.model == TOY and (value := getattr(options, name)) not in values:
            expected = " or ".join(str(each or "no flag") for each in values)
            raise ValueError(f"--{name}: got {value!r} with the toy pair, expected {expected}: it has no files, and a draft of its own")


def add_capture_check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODULE:NAME", help="a function that returns (step, buffers); with --buffers, the step itself")
    parser.add_argument("--buffers", metavar="MODULE:NAME", help="the step's StaticBuffers, or a function that returns them")
    parser.add_argument("--between", metavar="MODULE:NAME", help="called between the two recordings, to change host state")
    parser.add_argument("--replay", action="store_true", help="also run and replay the step from the same state, and compare all bits")


def add_check_schema_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schema", metavar="FILE|JSON", help="a JSON schema: a file, or the schema itself")
    help_text = "closed: undeclared properties only where the schema mentions them; standard: as JSON Schema says (default: closed)"
    parser.add_argument("--objects", choices=["closed", "standard"], default="closed", help=help_text)


def read_checked_schema(options: argparse.Namespace) -> None:
    options.schema = read_schema("FILE", options.schema)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, OR_TOY)
    add("--name", metavar="NAME", help="the model's name in requests (default: the last part of its path)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)")
    add_number(parser, "--port", 8000, "port to listen on; 0 picks a free one", 0, 65535)
    add_number(parser, "--max-rows", 8, "requests decoded at once", 1, 4096)
    add_number(parser, "--max-length", 2048, "tokens of a prompt and its answer", 2)
    add_number(parser, "--max-queued", 256, "requests that may wait; more get status 429", 1)
    add_number(parser, "--max-connections", 512, "open connections; more are closed", 1)
    add_number(parser, "--max-body-bytes", 2 << 20, "of a request; a larger one gets status 413", 1)
    help_text = "seconds that an answer may take, its time in the queue included; then status 504"
    add_number(parser, "--answer-seconds", 600.0, help_text, LEAST_SECONDS, SECONDS_PER_DAY)
    add("--preemption", action="store_true", help="a request takes the row of one with larger `priority`, which continues later")
    help_text = "pages of the cache, of 16 tokens each, or a share of a GPU's free memory (default: for --max-rows answers of --max-length)"
    add("--num-pages", type=_parse_pages, metavar="N|SHARE", help=help_text)
    help_text = "reserve: an answer has all its pages before it starts; grow: it gets them while it decodes (default: %(default)s)"
    add("--page-allocation", choices=("reserve", "grow"), default="reserve", help=help_text)
    add("--eager", action="store_true", help="capture no graphs: faster start, slower decoding")
    help_text = "time limit of a round; then the engine and its requests end with an error (default: none; 60 with --tensor-parallel)"
    add("--round-timeout-seconds", type=float, metavar="SECONDS", help=help_text)
    help_text = "LoRA adapters: folders in the layout of PEFT; a request selects an adapter by its name in `model`"
    add("--lora-modules", nargs="+", action="extend", default=[], metavar="NAME=FOLDER", help=help_text)
    add_number(parser, "--max-lora-rank", 16, "largest adapter rank; sets the memory taken", 1)
    add("--api-keys", metavar="FILE", help="accept only requests with an API key of this file, which has one key per line (default: any)")
    add("--log", action=argparse.BooleanOptionalAction, help="write one JSON object per request to stderr", default=True)
    help_text = "how the model writes tool calls; auto: as its chat template describes, otherwise hermes (default: %(default)s)"
    formats = ("auto", "hermes", "llama3", "mistral", "mistral-list", "qwen3-coder", "gpt-oss")
    add("--tool-format", choices=formats, default="auto", help=help_text)
    help_text = "seconds for running answers after SIGTERM or Ctrl-C; a second signal ends them at once"
    add_number(parser, "--grace", 30.0, help_text, 0, SECONDS_PER_DAY)
    add_drafts(parser)
    group = parser.add_argument_group("replicas (docs/scale.md)")
    help_text = "number of engines, or least and most, in processes of Ray Serve; if a process ends, its streams continue on another"
    group.add_argument("--replicas", type=_parse_replicas, metavar="N|LEAST-MOST", help=help_text)
    help_text = "when such a stream continues: with exactly the same tokens only, also if a near tie may differ, or never (default: exact)"
    group.add_argument("--resume", choices=("exact", "same-hardware", "never"), default="exact", help=help_text)
    add_number(group, "--tensor-parallel", 1, "processes among which each engine divides its layers", 1, 1024)
    add_number(group, "--replica-cpus", 1.0, "processors that Ray reserves for each replica", 0, 4096)
    add_number(group, "--replica-gpus", 0.0, "GPUs that Ray reserves for each replica", 0, 4096)
    add_loading(parser)


def _parse_path(text: str) -> Path:
    if not text:  # would be the current folder
        raise argparse.ArgumentTypeError("got '', expected a path")
    return Path(text)


def _parse_pages(text: str) -> float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        got = clip_repr(text)
        raise argparse.ArgumentTypeError(f"got {got}, expected a number of pages, or a share of the memory such as 0.8") from None


def _parse_replicas(text: str) -> tuple[int, int]:
    found = re.fullmatch("([0-9]{1,4})(?:-([0-9]{1,4}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most <= 1000:
        got = clip_repr(text)
        raise argparse.ArgumentTypeError(f"got {got}, expected a number of replicas from 1 to 1000, or the least and the most, such as 1-4")
    return least, most


def check_serve(options: argparse.Namespace) -> None:
    if options.round_timeout_seconds is not None:
        check_value("--round-timeout-seconds", options.round_timeout_seconds, number(LEAST_SECONDS, SECONDS_PER_DAY))
    check_toy(options)
    if options.tensor_parallel > 1 and options.model == TOY:
        raise ValueError(f"--tensor-parallel: got {options.tensor_parallel} with {TOY}, expected 1: its layers cannot be divided")
    if options.tensor_parallel > 1 and options.preemption:
        raise ValueError(f"--tensor-parallel: got {options.tensor_parallel} with --preemption, expected 1")
    others = {**dict.fromkeys(("resume", "replica_cpus", "replica_gpus"), "replicas"), "max_lora_rank": "lora_modules"}
    for name, other in others.items():
        value, default = getattr(options, name), options.parser.get_default(name)
        if value != default and not getattr(options, other):
            raise ValueError(f"{options.flags[name]}: got {value!r} without {options.flags[other]}, expected {default!r}")
    if options.name == "":
        raise ValueError("--name: got '', expected a name")
    options.lora_modules = _parse_lora_modules(options.lora_modules, options.name or Path(options.model).absolute().name)
    text = "" if options.api_keys is None else read_file("--api-keys", options.api_keys, "the path of a file")
    keys = [line.strip() for line in text.split("\n") if line.strip()]
    if options.api_keys is not None and not keys:
        raise ValueError(f"--api-keys: got {clip_repr(options.api_keys)} without a key, expected one key per line")
    options.api_keys = keys
    open_listener(options.host, options.port).close()  # an address in use is reported before a model is loaded


def _parse_lora_modules(pairs: Sequence[str], model: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder or name == model or name in found:
            expected = f"NAME=FOLDER with a name that neither the model ({model}) nor another adapter has"
            raise ValueError(f"--lora-modules: got {clip_repr(pair)}, expected {expected}")
        found[name] = folder
    return found


def add_inspect_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--draft", metavar="FOLDER", help="also check whether this draft fits the model")


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=_parse_path, metavar="FILE", help="a recording written by Engine(record=FILE)")
    add_model(parser, OR_TOY, "--model", required=True)
    add_draft(parser)
    add_loading(parser)


COMMANDS = {
    "demo": Command(
        "decode with a small real model and its draft, and show where the speed comes from",
        "Answer three prompts with SmolLM2-135M-Instruct and the draft that is part of stepgraph: extract a record, call a tool,\n"
        "answer a question. Plain and speculative decoding alternate, with and without grammars; then a few rounds are traced and\n"
        "written as a file for ui.perfetto.dev. Exit code 1: an answer fails or breaks its schema.",
        (
            "stepgraph demo --toy --html report.html",
            "stepgraph demo --toy -k 2 --json --no-timeline",
        ),
        add_demo_flags,
        check_demo,
    ),
    "generate": Command(
        "answer a prompt with a model from a folder or a GGUF file, under a schema, pattern or grammar",
        "Answer one prompt and print the text while it is generated.\n"
        "Exit code 1: the answer failed, or --max-new-tokens cut it short of its constraint.",
        (
            'stepgraph generate model "Is water wet?" --choice yes --choice no',
            """stepgraph generate model "Is water wet?" --json --schema"""
            """ '{"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}'""",
            'echo "Once upon a time" | stepgraph generate model - --no-chat --draft ngram -k 4 --temperature 0.8 --seed 1 --stop "The end"',
        ),
        add_generate_flags,
        check_generate,
    ),
    "serve": Command(
        "serve a model over HTTP: OpenAI's chat and completions, streaming, tools, response_format, metrics",
        "Serve a model to OpenAI's clients until SIGTERM or Ctrl-C. Running answers may then take --grace seconds. Listens on this\n"
        "machine only, unless --host is given. The address is printed once the server listens. Needs pip install 'stepgraph[serve]'.",
        (
            "stepgraph serve toy --eager --port 0",
            "stepgraph serve model --draft ngram -k 4 --max-rows 2 --max-length 64 --port 0 --name mine --json",
        ),
        add_serve_flags,
        check_serve,
    ),
    "bench": Command(
        "measure tokens per second of a model: plain and speculative, with and without a grammar",
        "Answer the same prompts with and without speculation and with and without grammars, the variants interleaved. Decoding is\n"
        "greedy; tokens per second count from the first token of an answer; cached prompts are not reused. The table shows the\n"
        "median, least and most of the repeats. Exit code 1: an answer failed.",
        (
            "stepgraph bench toy --repeats 2 --max-new-tokens 32",
            "stepgraph bench model --draft ngram -k 4 --prompts prompts.jsonl --repeats 1 --max-new-tokens 24 --json",
        ),
        add_bench_flags,
        check_toy,
    ),
    "doctor": Command(
        "what is installed, what is missing, what is lost without it, and how to install it",
        "Check Python, torch, GPUs, compilers, grammar libraries and optional packages, and decode a text under a schema.\n"
        "Exit code 1: something required is missing, or the text could not be decoded.",
        ("stepgraph doctor", "stepgraph doctor --json"),
        lambda parser: None,
    ),
    "inspect": Command(
        "what a model is, how much memory its weights take, how it runs, and what is refused, without loading it",
        "Read config, tokenizer and headers, and print family, stored types, and for each implementation and kind of weights the bytes\n"
        "in memory, or why it is refused; then the drafters.\n"
        "Exit code 1: the model cannot be run, or --draft does not fit it.",
        ("stepgraph inspect model", "stepgraph inspect model --draft model --json"),
        add_inspect_flags,
    ),
    "capture-check": Command(
        "check whether your step can be captured; reports the line that prevents it",
        "Record a step twice and compare the recordings: into a CUDA graph if its buffers are on a GPU, otherwise on the tape.\n"
        "Reading host state, waiting for the device and data-dependent shapes are errors with rule, file and line.\n"
        "MODULE:NAME is called without arguments and returns (step, buffers). The current folder is on the import path.\n" + STEP_EXAMPLE,
        (
            "stepgraph capture-check my_step:make",
            "stepgraph capture-check my_step:make --replay --json",
            "stepgraph capture-check my_step:step --buffers my_step:buffers",
        ),
        add_capture_check_flags,
    ),
    "check-schema": Command(
        "check which parts of a JSON schema are enforced, and what to write instead of the others",
        "Compile a JSON schema and print a line for each part that is refused: its place as a JSON pointer, keyword, value, reason\n"
        "and a suggestion. A part that is narrowed is enforced, but not all of its texts are generated.\n"
        "Exit code 0: all of the schema is enforced. 1: a part is refused. 2: FILE cannot be read.",
        (
            "stepgraph check-schema person.json",
            """stepgraph check-schema '{"type": "string", "format": "date"}' --objects standard --json""",
        ),
        add_check_schema_flags,
        read_checked_schema,
    ),
    "replay": Command(
        "submit the requests of a recording (record=FILE) again and compare the answers token by token",
        "Submit the recorded requests to the same model at the steps at which they started, and compare the answers. Rounds have the\n"
        "recorded numbers of drafts. The text of a cancelled request is compared up to the length of the shorter one.\n"
        "Exit code 1: an answer differs. 2: FILE is not a recording, or is one of another model.",
        ("stepgraph replay toy.jsonl --model toy", "stepgraph replay run.jsonl --model model --draft ngram --json"),
        add_replay_flags,
        check_toy,
    ),
}


def add_model(parser: argparse.ArgumentParser, more: str = "", name: str = "model", **options: Any) -> None:
    help_text = f"a Hugging Face folder, a .gguf file, demo for the pair of the demonstration{more}"
    parser.add_argument(name, metavar="MODEL", help=help_text, **options)


def add_number(parser: argparse._ActionsContainer, names: str, default: float, text: str, least: float, most: int | None = None) -> None:
    """A flag with a number of the default's type; `check_ranges` refuses one that is out of range."""
    action = parser.add_argument(*names.split(), type=type(default), default=default, metavar="N", help=f"{text} (default: %(default)s)")
    check = whole(int(least), most) if isinstance(default, int) else number(least, math.inf if most is None else most)
    parser.set_defaults(ranges={**(parser.get_default("ranges") or {}), action.dest: check})


def check_ranges(options: argparse.Namespace) -> None:
    for name, check in getattr(options, "ranges", {}).items():
        check_value(options.flags[name], getattr(options, name), check)


def add_drafts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafts")
    add_draft(group)
    group.add_argument("-k", "--drafts", type=int, default=4, metavar="N", help="most drafts per round, 0 to 8 (default: 4)")
    help_text = "auto: each round has the number of drafts that is fastest; N: every round has N (default: auto)"
    add = group.add_argument  # EngineConfig checks the length
    add("--draft-length", type=lambda text: int(text) if text.isdecimal() else text, default="auto", metavar="auto|N", help=help_text)
    look_up = "with a draft model: first look for at least N matching tokens in the text and propose what followed them"
    group.add_argument("--look-up", type=int, default=0, metavar="N", help=look_up)


def add_draft(parser: argparse._ActionsContainer) -> None:
    help_text = "a draft's folder, mtp, ngram, forced or none; auto: MTP modules that the model has, otherwise ngram (default: auto)"
    parser.add_argument("--draft", default="auto", metavar="WORD|FOLDER", help=help_text)


def add_loading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="type of weights and cache (default: the model's own)")
    help_text = "quantised weights: converted to --dtype, or kept quantised in memory (default: %(default)s)"
    parser.add_argument("--weights", choices=("dequantised", "quantised"), default="dequantised", help=help_text)
    help_text = "native: a class of stepgraph; transformers: of that package; auto: native if it supports the model (default: %(default)s)"
    parser.add_argument("--implementation", choices=("auto", "native", "transformers"), default="auto", help=help_text)
    add_threads(parser)


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: OMP_NUM_THREADS, otherwise torch's default)")
