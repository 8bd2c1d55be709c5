"""Builds an engine's parts: drafter, backend, static buffers, host link, graphs, scheduler."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from stepgraph.graphs import round_specs
from stepgraph.graphs.attention.choose import choose_attention
from stepgraph.graphs.attention.float8 import FLOAT8
from stepgraph.graphs.attention.paged import AttentionChoice
from stepgraph.graphs.backends import make_backend
from stepgraph.graphs.buffer_spec import check_fit
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, BackendName
from stepgraph.graphs.errors import MEMORY_SETTINGS
from stepgraph.graphs.graph_key import FULL
from stepgraph.graphs.graph_set import GraphSet, draft_choices
from stepgraph.graphs.layers.lora import lora_specs
from stepgraph.graphs.layers.product_choice import choose_products
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.logits_processors import check_processors
from stepgraph.graphs.memory import available_bytes
from stepgraph.graphs.model import Models, TargetModel
from stepgraph.graphs.prefill import Prompts, prompt_specs
from stepgraph.graphs.proposing import process_skipped, text_specs
from stepgraph.graphs.round import Round
from stepgraph.graphs.sampled_stages import AcceptOptions
from stepgraph.runtime.check_models import Drafter, check_models, checked_vocabulary_size, devices_of, forces_drafts, resolve_drafter
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.device_grammars import INT_BYTES, DeviceGrammars, why_no_device_grammars
from stepgraph.runtime.draft_length import DraftLengthChooser
from stepgraph.runtime.hidden_states import HiddenStates, StatesLayout, states_layout
from stepgraph.runtime.host_drafts import FunctionDrafts, FunctionProposer
from stepgraph.runtime.in_flight import InFlight
from stepgraph.runtime.loops import LoopInFlight
from stepgraph.runtime.loras import lora_weights
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.runtime.parallel.lockstep import LockstepQueue, LockstepScheduler
from stepgraph.runtime.parallel.ranks import Ranks, ranks_of
from stepgraph.runtime.preemption import PreemptingScheduler
from stepgraph.runtime.profiled import ROUNDS_VARIABLE, in_flight_type, read_range
from stepgraph.runtime.record import Recorder, Recording, open_recorder
from stepgraph.runtime.request_queue import RequestQueue
from stepgraph.runtime.row_table import PrefixSharing
from stepgraph.runtime.scheduler import Scheduler
from stepgraph.runtime.upload import Uploader
from stepgraph.runtime.validate import RequestValidator
from stepgraph.runtime.watchdog import Watchdog
from stepgraph.sampling.fields import check_members, check_value, instance_of, optional
from stepgraph.sampling.grammar.automaton.grammar import SplitTensors, TokenTensors, split_tensors, token_tensors
from stepgraph.sampling.grammar.link.native import open_host_link
from stepgraph.sampling.grammar.matchers.forced import Forcing, token_lookup
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.kernels.triton import why_no_triton


class EngineParts:
    """The parts of one engine. ValueError if one cannot be built from these arguments; `taken` then closes those that were."""

    def __init__(
        self,
        taken: ExitStack,
        target: TargetModel,
        draft: Drafter | str | None,
        vocabulary: Vocabulary | None,
        config: EngineConfig,
        backend: Backend | None,
        record: Recording | str | Path | None,
    ) -> None:
        check_members("Engine.target", target, TargetModel)
        check_value("Engine.vocabulary", vocabulary, optional(instance_of(Vocabulary, "a Vocabulary")))
        if backend is not None:
            check_members("Engine.backend", backend, Backend)
        self.models, self.config = models, config = resolve_drafter(target, draft, config)
        self.backend = taken.enter_context(closing(backend_for(config.backend, models, config.nvtx))) if backend is None else backend
        self.config, self.limits = config, limits = with_counted_pages(config, models, vocabulary, self.backend.device)
        self.watchdog = Watchdog(self.backend, config.round_timeout_seconds)
        timed, device, proposer, folder = self.watchdog.backend, self.backend.device, models.proposer, config.save_hidden_states
        check_models(models, self.backend, limits)

        layout = states_layout(target) if folder else None
        forced, why_no_tables = forces_drafts(config, models, vocabulary), why_no_device_grammars(config, device, vocabulary)
        tables = None if why_no_tables or vocabulary is None else token_tensors(vocabulary, device)
        split = split_tensors(vocabulary, device) if tables and vocabulary and forced else None
        self.buffers = buffers = make_buffers(config, models, limits, device, layout, forced, tables, split)
        self.attention, self.products_note = attention_for(device, config, models), products_for(models, self.ranks)

        forcing = Forcing(token_lookup(vocabulary), buffers.forced_host) if vocabulary and forced else None
        pinned = buffers.state_host, buffers.drafts_host, buffers.masks_host, buffers.tags_host
        self.host_link = open_host_link(config.host_link, *pinned, limits.ring_depth, forcing, config.check_masks, buffers.contents_host)
        self.grammars = DeviceGrammars(why_no_tables, config, self.host_link)
        self.vocabulary, self.compiler = vocabulary, config.grammar_compiler(vocabulary) if vocabulary is not None else None

        options = accept_options(config, models, limits, self.backend)
        decode_round = Round(limits, models, self.host_link, config.draft_masks, options, self.attention, tables, split)
        prompts = Prompts(limits, models, self.attention)
        self.validator = RequestValidator(config, limits, vocabulary, models, pinned=device.type == "cuda")
        queue_type, scheduler_type = queue_types(config, self.ranks)
        self.sharing = sharing_for(config, models)
        self.profile_range = read_range(os.environ)  # ValueError before the recording exists
        self.hidden_states = states = HiddenStates(timed, buffers, layout, folder, config.states_shard_bytes) if layout and folder else None
        taken.enter_context(closing(states.writer) if states else nullcontext())
        recorder = None if record is None else open_recorder(record, config, models, vocabulary, self.backend, tables is not None)
        self.function_drafts = FunctionDrafts(proposer.function, timed, buffers, limits) if isinstance(proposer, FunctionProposer) else None
        self.draft_lengths = make_chooser(config, models, recorder, tables is not None, self.function_drafts)
        self.graphs = GraphSet(
            timed,
            buffers,
            decode_round.step,
            config.bucket_sizes,
            config.on_capture_failure,
            config.capture_bytes,
            tables is not None,
            self.draft_lengths.choices if self.draft_lengths else (FULL,),
            prompts if not config.eager and (device.type == "cuda" if config.prompt_graphs is None else config.prompt_graphs) else None,
        )

        self.queue = queue_type(config.max_queued, self.compiler, self.grammars, recorder)
        self.scheduler = scheduler_type(
            self.queue, self.grammars, limits, self.sharing, recorder, states.save if states else None, isinstance(proposer, NgramLookup)
        )
        watchdog, processors = None if config.round_timeout_seconds is None else self.watchdog, config.logits_processors
        self.uploader = Uploader(timed, buffers, models, limits, prompts, self.graphs, watchdog, states, processors, record is not None)
        in_flight = loop_in_flight_type(self) if limits.loops else in_flight_type(self.profile_range)
        self.in_flight = in_flight(
            timed, buffers, self.graphs, self.host_link, limits, states, self.draft_lengths, catch_up_for(models, limits, buffers)
        )

    @property
    def ranks(self) -> Ranks | None:
        return ranks_of(self.models.target)


def with_counted_pages(
    config: EngineConfig, models: Models, vocabulary: Vocabulary | None, device: torch.device
) -> tuple[EngineConfig, Limits]:
    """The config and its limits. A share of the free memory becomes the number of pages with which the caches of all models take it."""
    limits = config.limits(models.target.vocab_size, checked_vocabulary_size(models, vocabulary), models.target.feature_size)
    share, least = config.num_pages, limits.num_pages
    if not isinstance(share, float):
        return config, limits

    def cache_bytes(num_pages: int) -> int:
        named, sizes = (models.target, models.drafter, models.look_up), replace(limits, num_pages=num_pages)
        return sum(spec.nbytes for model in named if model is not None for spec in model.cache_specs(sizes))

    where = f"on {device.type}" if ranks_of(models.target) is None else "with tensor_parallel"
    free_bytes = available_bytes(device) if where == "on cuda" else None
    if free_bytes is None:
        got = f"{share} {where}"
        raise ValueError(f"EngineConfig.num_pages: got {got}, expected a whole number, or None: a share is of the memory of one GPU")
    page_bytes = cache_bytes(least + 1) - cache_bytes(least)
    added = (int(share * free_bytes) - cache_bytes(least)) // page_bytes if page_bytes else 0
    if added < 0:
        expected = f"expected a share for {least} pages of {page_bytes:,} bytes, one row of max_length={config.max_length}"
        raise ValueError(f"EngineConfig.num_pages: got {share} of {free_bytes:,} free bytes, {expected}")
    return replace(config, num_pages=least + added), replace(limits, num_pages=least + added)


def accept_options(config: EngineConfig, models: Models, limits: Limits, backend: Backend) -> AcceptOptions:
    """CaptureError for a logits processor that cannot be part of a round."""
    check_processors(config.logits_processors, limits, backend)
    return AcceptOptions(config.forced_acceptance, config.logits_processors, getattr(models.target, "shard", None))


def queue_types(config: EngineConfig, ranks: Ranks | None) -> tuple[Callable[..., RequestQueue], Callable[..., Scheduler]]:
    if ranks is not None:
        return functools.partial(LockstepQueue, ranks), functools.partial(LockstepScheduler, ranks)
    if not (config.preemption or config.page_allocation == "grow"):
        return RequestQueue, Scheduler
    return RequestQueue, functools.partial(PreemptingScheduler, config.preemption, config.rounds_per_launch == "until_event")


def catch_up_for(models: Models, limits: Limits, buffers: StaticBuffers) -> Callable[[int], None] | None:
    """Runs the draft model over the tokens that it skipped; None if it runs in every round."""
    draft = models.draft if "row_skipped_tokens" in buffers else None
    return None if draft is None else functools.partial(process_skipped, buffers, model=draft, limits=limits)


def loop_in_flight_type(parts: EngineParts) -> Callable[..., InFlight]:
    """The constructor of LoopInFlight, whose launches run many rounds. ValueError if the engine cannot have them."""
    # The host reads a header and then the results that it announces, without a barrier between the two.
    is_ordered, backend = platform.machine() in ("x86_64", "AMD64"), parts.backend
    reasons = {
        f"{platform.machine()} may reorder the host's reads of what a running launch writes": backend.name == "cuda" and not is_ordered,
        backend.why_no_loops: bool(backend.why_no_loops),
        "no Triton kernel writes the results": backend.device.type == "cuda" and bool(why_no_triton(backend.device)),
        "a draft function is called between two rounds": isinstance(parts.models.proposer, FunctionProposer),
        f"{ROUNDS_VARIABLE} profiles single rounds": parts.profile_range is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"EngineConfig.rounds_per_launch: got 'until_event', expected 1: {reason}")
    return functools.partial(LoopInFlight, parts.queue, parts.watchdog.poll, parts.limits.max_length)


def make_chooser(
    config: EngineConfig, models: Models, recorder: Recorder | None, device_grammars: bool, function: FunctionDrafts | None
) -> DraftLengthChooser | None:
    """The chooser of draft lengths; None if every round has num_speculative_tokens drafts."""
    if config.draft_length != "auto" or models.drafter is None:
        return None
    choices = draft_choices(config.num_speculative_tokens, models.draft is not None, models.look_up is not None)
    record = None if recorder is None else lambda each: recorder.write("round", drafts=each.length, model=each.model)
    chooser = DraftLengthChooser(choices, record, device_grammars)
    chooser.num_given_drafts = None if function is None else function.num_drafts.__getitem__
    return chooser


def backend_for(name: BackendName, models: Models, nvtx: bool) -> Backend:
    """`auto`: by the target's device; for a target without tensors, a GPU if there is one. STEPGRAPH_NVTX=1 is nvtx=True."""
    devices = devices_of(models.target)
    if name == "auto" and devices:
        name = "cuda" if devices[0].type == "cuda" else "tape"
    try:
        return make_backend(name, asynchronous=True, nvtx=nvtx or os.environ.get("STEPGRAPH_NVTX") == "1")
    except ValueError as error:
        raise ValueError(f"EngineConfig.{error}") from None


def attention_for(device: torch.device, config: EngineConfig, models: Models) -> AttentionChoice:
    """The attention implementation for these models; ValueError if the configured one does not support them."""
    float8 = config.kv_cache_dtype == FLOAT8
    shapes = tuple(shape._replace(float8=float8) for model in models for shape in getattr(model, "attends", ()))
    try:
        return choose_attention(device, config.attention, shapes, config.page_size)
    except ValueError as error:
        raise ValueError(f"EngineConfig.{error}") from None


def products_for(models: Models, ranks: Ranks | None) -> str:
    """The note on products with packed weights; empty without such weights on a GPU."""
    modules: list[object] = list(models)  # the declared types of the models have no methods of nn.Module
    weights = (each for module in modules if isinstance(module, nn.Module) for each in module.parameters())
    return choose_products(models.target.feature_dtype, weights, ranks)


def sharing_for(config: EngineConfig, models: Models) -> PrefixSharing:
    """How requests share pages, as configured and as the models allow."""
    named = {"target": models.target, "draft": models.draft}
    unshared = [name for name, model in named.items() if not getattr(model, "shares_prefix", True)]
    lookahead = int(getattr(models.draft, "lookahead", 0))
    why_off = "" if config.prefix_reuse else "EngineConfig.prefix_reuse is False"
    why_off = why_off or ("the states of whole texts are saved" if config.save_hidden_states else "")
    why_off = why_off or (f"the {unshared[0]} has shares_prefix = False" if unshared else "")
    return PrefixSharing(why_off, config.prefix_cache_pages, int(models.draft is not None and lookahead == 0), lookahead)


def make_buffers(
    config: EngineConfig,
    models: Models,
    limits: Limits,
    device: torch.device,
    layout: StatesLayout | None,
    forced: bool,
    tables: TokenTensors | None,
    split: SplitTensors | None,
) -> StaticBuffers:
    """All static memory: of the round, of the models' caches, of saved states and grammars. Weights and token tables are constants."""
    candidates = (("target", models.target), ("draft", models.drafter), ("look_up", models.look_up))
    named = {name: model for name, model in candidates if model is not None}
    samples_drafts = not config.greedy_only and models.proposer is None
    specs = [
        *round_specs.round_specs(limits, samples_drafts),
        *round_specs.ring_specs(limits),
        *prompt_specs(limits, models.target),
        *[spec for model in named.values() for spec in model.cache_specs(limits)],
        *lora_specs(lora_weights(models.target, limits), limits, models.target.feature_dtype),
    ]
    specs += text_specs(limits) if models.reads_text else ()
    specs += round_specs.look_up_specs(limits) if models.look_up is not None else ()
    if layout:
        specs += round_specs.state_specs(limits, layout.width, models.target.feature_dtype)
    specs += round_specs.forced_specs(limits) if forced else ()
    processors = config.logits_processors
    specs += round_specs.admission_specs(limits, config.relaxed_acceptance, sum(1 + each.num_arguments for each in processors))
    if config.draft_length == "auto" and models.draft is not None and models.draft.cache_specs(limits):
        specs += round_specs.skipped_specs(limits, models.target.feature_dtype)
    constants: dict[str, nn.Module | torch.Tensor] = {name: model for name, model in named.items() if isinstance(model, nn.Module)}
    modules = {f"logits_processor_{each.name}": each.function for each in processors}
    constants |= {name: function for name, function in modules.items() if isinstance(function, nn.Module)}
    if tables is not None:
        arena_size, depth = config.grammar_arena_bytes // INT_BYTES, config.grammar_limits.automaton_depth
        specs += round_specs.grammar_specs(limits, arena_size, depth, split is not None)
        constants |= tables._asdict()
    if split is not None:
        constants["token_slots"] = split.token_slots
    check_fit("EngineConfig", specs, device, f"; lower {MEMORY_SETTINGS}")
    return StaticBuffers(specs, device, constants)
