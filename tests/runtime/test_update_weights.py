"""New weights in a loaded engine: the same tokens as a fresh engine with these weights; wrong ones change nothing."""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepgraph import AsyncEngine, Engine, EngineClosedError, EngineConfig, FinishReason, SamplingParams, StepEvent
from stepgraph.graphs import TapeBackend
from stepgraph.runtime.models.files.transformers_folder import Implementation
from stepgraph.runtime.models.files.weights import SafetensorsSource
from stepgraph.runtime.models.toy import ToyTarget
from tests.helpers.c_library import needs_c
from tests.helpers.families import BASE, CONFIG, FAMILIES, GRAMMAR, PROMPTS, folder_of, hf_model, random_model, save
from tests.helpers.toy_engines import VOCABULARY, finish
from tests.laws.test_interrupts import interrupted
from tests.runtime.models.files.test_quantised_folder import SIZES, write

FAMILY = "qwen2"


def other(family: str) -> Any:
    """A model of the same family with other weights."""
    kind, changes = FAMILIES[family]
    return random_model(kind, BASE | changes, seed=91)


def texts(engine: Engine) -> list[list[int]]:
    jobs = [engine.submit(prompt, max_new_tokens=12, constraint=each) for each in (None, GRAMMAR) for prompt in PROMPTS]
    finish(engine)
    return [job.tokens for job in jobs]


def expected_texts(folder: Path, **options: Any) -> list[list[int]]:
    with Engine.from_pretrained(folder, None, config=CONFIG, **options) as fresh:
        return texts(fresh)


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(other(FAMILY), tmp_path_factory.mktemp("new"))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("family", ["qwen2", "smollm2", "gemma-3"])  # joined products with biases, tied weights, norms with an offset
def test_texts_equal_those_of_a_fresh_engine(family: str, implementation: Implementation, tmp_path: Path) -> None:
    """From pairs; back from a state dict, which repeats tied weights; and again from a folder."""
    model = other(family)
    folder = save(model, tmp_path)
    expected = expected_texts(folder, implementation=implementation)
    with Engine.from_pretrained(folder_of(family), "ngram", config=CONFIG, implementation=implementation) as engine:
        before, addresses = texts(engine), engine.buffers.fingerprint()
        graphs = dict(engine._graphs._recorded)
        for weights, new in ((model.named_parameters(), expected), (hf_model(family).state_dict(), before), (str(folder), expected)):
            engine.update_weights(weights)
            assert texts(engine) == new
        assert expected != before and engine.buffers.fingerprint() == addresses and graphs.items() <= engine._graphs._recorded.items()


def test_a_draft_model_keeps_its_weights(new_folder: Path) -> None:
    with Engine.from_pretrained(folder_of(FAMILY), folder_of(FAMILY), config=CONFIG) as engine:
        engine.update_weights(new_folder)
        assert texts(engine) == expected_texts(new_folder)


def test_an_engine_with_the_same_model_has_the_new_weights_once_its_prefixes_are_reset(new_folder: Path) -> None:
    prompt, engine = [*range(5, 45)], Engine.from_pretrained(folder_of(FAMILY), None, config=CONFIG)
    with engine, Engine(engine._parts.models.target, "ngram", vocabulary=engine.vocabulary, config=CONFIG) as sharing:
        sharing.generate(prompt, max_new_tokens=8)
        engine.update_weights(new_folder)
        assert sharing.generate(prompt, max_new_tokens=8).num_cached_tokens > 0, "prefixes of the old weights"
        sharing.reset_prefix_cache()
        job = sharing.generate(prompt, max_new_tokens=8)
        assert job.tokens == engine.generate(prompt, max_new_tokens=8).tokens and job.num_cached_tokens == 0
        assert texts(sharing) == expected_texts(new_folder)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "deepseek-v3", "phi-3, with a window"])
def test_experts_latent_attention_and_stored_products_are_updated_from_a_folder(family: str, tmp_path: Path) -> None:
    folder = save(other(family), tmp_path)
    with Engine.from_pretrained(folder_of(family), "ngram", config=CONFIG, implementation="native") as engine:
        before = texts(engine)
        engine.update_weights(folder)
        assert texts(engine) == expected_texts(folder, implementation="native") != before


def test_some_weights_are_updated(tmp_path: Path) -> None:
    model = random_model(FAMILIES[FAMILY][0], BASE, seed=len(FAMILY))
    model.load_state_dict(hf_model(FAMILY).state_dict())
    name = "model.layers.1.self_attn.k_proj.weight"  # a part of one parameter
    with torch.no_grad():
        model.get_parameter(name).mul_(-1.5)
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        before = texts(engine)
        engine.update_weights({name: model.get_parameter(name).double().to(torch.bfloat16)})  # another type, rounded once
        model.get_parameter(name).data = model.get_parameter(name).data.to(torch.bfloat16).float()
        assert texts(engine) == expected_texts(save(model, tmp_path)) != before


class Scaled(ToyTarget):
    def __init__(self) -> None:
        super().__init__(VOCABULARY.logits_width, seed=3)
        self.scale = nn.Parameter(torch.ones(VOCABULARY.logits_width))

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * self.scale


def test_parameters_of_a_module_of_the_user_have_its_names() -> None:
    config = EngineConfig(max_rows=2, num_speculative_tokens=2, max_length=48, greedy_only=True)
    new = 1 - 2 * (torch.arange(VOCABULARY.logits_width) % 2.0)

    def run(engine: Engine) -> list[int]:
        return engine.generate([1, 2], max_new_tokens=20).tokens

    with (
        Engine(Scaled(), "ngram", vocabulary=VOCABULARY, config=config) as engine,
        Engine(fresh := Scaled(), "ngram", vocabulary=VOCABULARY, config=config) as expected,
    ):
        before = run(engine)
        engine.update_weights({"scale": new})
        fresh.scale.data.copy_(new)
        assert run(engine) == run(expected) != before


def cached(engine: Engine) -> int:
    return engine.generate([5 + index % 11 for index in range(40)], max_new_tokens=1).num_cached_tokens


def test_cached_prefixes_are_forgotten(new_folder: Path) -> None:
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        assert [cached(engine), cached(engine)] == [0, 36]
        engine.reset_prefix_cache()
        assert engine.stats().cached_pages == 0
        assert [cached(engine), cached(engine)] == [0, 36]
        engine.update_weights(new_folder)
        assert [cached(engine), cached(engine)] == [0, 36]
        assert engine.stats().free_pages == engine.stats().pages


@pytest.mark.parametrize(("steps", "chunk"), [(1, 3), (2, 7), (8, 7)])
def test_a_running_request_shares_no_pages_after_a_reset(steps: int, chunk: int) -> None:
    """Its prompt is computed in chunks of which some precede the reset; with 3 tokens the first page is not full then."""
    prompt = [5 + index % 11 for index in range(40)]
    with Engine.from_pretrained(folder_of(FAMILY), None, config=replace(CONFIG, prefill_chunk=chunk)) as engine:
        expected = engine.generate(prompt, max_new_tokens=9, cache_salt="other").tokens
        job = engine.submit(prompt, max_new_tokens=9)
        for _ in range(steps):
            engine.step()
        engine.reset_prefix_cache()
        finish(engine)
        assert job.tokens == expected
        assert cached(engine) == 0
        assert engine.stats().free_pages == engine.stats().pages


def test_running_requests_end_first_and_waiting_ones_get_the_new_weights(new_folder: Path) -> None:
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        old = [engine.generate(PROMPTS[0], max_new_tokens=number).tokens for number in (20, 21, 22)]
        running = [engine.submit(PROMPTS[0], max_new_tokens=number) for number in (20, 21, 22)]
        engine.step()
        waiting = [engine.submit(PROMPTS[0], max_new_tokens=20) for _ in range(2)]
        engine.update_weights(new_folder)
        assert [job.tokens for job in running] == old and not any(job.tokens for job in waiting)
        finish(engine)
        with Engine.from_pretrained(new_folder, None, config=CONFIG) as fresh:
            new = fresh.generate(PROMPTS[0], max_new_tokens=20).tokens
        assert [job.tokens for job in waiting] == [new, new] and new != old[0]


def test_the_next_step_returns_the_events_of_an_update(new_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that steps while there is work gets all tokens, and then the end."""
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        jobs, events = [engine.submit(prompt, max_new_tokens=20) for prompt in PROMPTS], list[StepEvent]()
        while not jobs[0].tokens:
            events += engine.step()
        finish, has_work = engine._scheduler.finish, list[bool]()

        def finished(*arguments: Any) -> StepEvent:
            event = finish(*arguments)
            has_work.append(engine.has_work)
            return event

        monkeypatch.setattr(engine._scheduler, "finish", finished)
        for _ in range(2):
            engine.update_weights(new_folder)
        assert has_work == [True] * len(jobs) and engine.has_work and engine.wait(0)
        events += engine.step()
        assert not engine.has_work and not engine.step()
        for job in jobs:
            own = [event for event in events if event.job_id == job.id]
            assert [token for event in own for token in event.tokens] == job.tokens
            assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + [FinishReason.LENGTH]


def test_suspended_requests_end_with_the_old_weights(new_folder: Path) -> None:
    """A request that lost its pages to an earlier one continues before the update."""
    config = replace(CONFIG, page_allocation="grow", num_pages=24, max_rows=3)
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=config) as engine:
        old = engine.generate(PROMPTS[1], max_new_tokens=40).tokens
        jobs = [engine.submit(PROMPTS[1], max_new_tokens=40, cache_salt=str(number)) for number in range(3)]
        while not any(job.num_preemptions for job in jobs):
            engine.step()
        late = engine.submit(PROMPTS[1], max_new_tokens=40, priority=-1)
        engine.update_weights(new_folder)
        assert [job.tokens for job in jobs] == [old] * 3 and not late.tokens
        finish(engine)
        assert late.tokens != old


def test_an_async_engine_serves_during_an_update(new_folder: Path) -> None:
    """Tasks submit all the time: each text is that of the old or of the new weights, and those after the call are of the new ones."""

    async def run(engine: Engine) -> tuple[list[list[int]], list[int]]:
        found, done = list[list[int]](), False

        async def client(serving: AsyncEngine) -> None:
            while not done:
                found.append((await serving.generate(PROMPTS[0], max_new_tokens=20)).tokens)

        async with AsyncEngine(engine) as serving:
            clients = [asyncio.ensure_future(client(serving)) for _ in range(5)]
            while len(found) < 5:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(engine.update_weights, new_folder)
            last = (await serving.generate(PROMPTS[0], max_new_tokens=20)).tokens
            done = True
            await asyncio.gather(*clients)
        return found, last

    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        old = engine.generate(PROMPTS[0], max_new_tokens=20).tokens
        found, last = asyncio.run(run(engine))
        new = engine.generate(PROMPTS[0], max_new_tokens=20).tokens
        assert last == new != old
        changed = found.index(new)
        assert found[:changed] == [old] * changed and found[changed:] == [new] * (len(found) - changed)


def test_no_request_begins_during_an_update() -> None:
    """As of another thread that steps while the update waits; the thread of an AsyncEngine sleeps."""
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        engine.queue.holds.add(hold := object())
        job = engine.submit(PROMPTS[0], max_new_tokens=4)
        assert not engine.wait(0) and not any(engine.step() for _ in range(3)) and not job.tokens
        engine.queue.holds.discard(hold)
        assert engine.wait(0)
        finish(engine)
        assert len(job.tokens) == 4


def test_an_interrupt_leaves_no_prefix_of_other_weights_and_no_hold() -> None:
    """The call is interrupted at each point of its own file."""
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=32, page_size=4, greedy_only=True, eager=True)
    target, index, was_interrupted, found = Scaled(), 0, True, set[bool]()
    with Engine(target, vocabulary=VOCABULARY, config=config, backend=TapeBackend()) as engine:
        while was_interrupted:
            engine.generate(range(12), max_new_tokens=1)
            new = -target.scale.detach()
            call = functools.partial(engine.update_weights, {"scale": new})
            was_interrupted = interrupted(index := index + 1, call, "runtime/engine.py")
            found.add(is_new := torch.equal(target.scale, new))
            assert not engine.queue.holds and not (is_new and engine.stats().cached_pages), index
    assert found == {False, True} and index > 10


def changed(**tensors: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {**weights, **{name.replace("__", "."): value for name, value in tensors.items()}}


def failing_pairs(weights: dict[str, Any], error: Exception) -> Iterator[tuple[str, Any]]:
    """As of a training process that ends while it sends its tensors."""
    yield from weights.items()
    raise error


K = "model__layers__0__self_attn__k_proj__weight"
REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "name": (
        changed(model__layers__9__x=torch.zeros(2)),
        r"weights: got 1 tensors that the model does not have, such as 'model.layers.9.x'",
    ),
    "shape": (changed(**{K: torch.zeros(2, 64)}), r"k_proj.weight: got shape \(2, 64\), expected \(32, 64\)"),
    "shape of the last": (changed(model__norm__weight=torch.zeros(2)), r"norm.weight: got shape \(2,\), expected \(64,\)"),
    "iterator": (lambda weights: failing_pairs(weights, ValueError("no rank 3")), "^no rank 3$"),
    "a name twice": (lambda weights: [*weights.items()] * 2, "weights: got .* twice, expected each name once"),
    "type": (changed(**{K: torch.zeros(32, 64, dtype=torch.int8)}), "k_proj.weight: got type torch.int8, which is not supported"),
    "no values": (changed(**{K: torch.zeros(32, 64, device="meta")}), "k_proj.weight: got type Tensor on meta"),
    "no tensor": (changed(**{K: [1.0]}), r"k_proj.weight: got shape \(\), expected"),
    "numbers": (changed(**{K: torch.full((32, 64), torch.nan)}), "k_proj.weight holds NaN or infinity"),
    "no mapping": (lambda weights: 7, "weights: got 7, expected a mapping of names to tensors"),
    "no path": (lambda weights: "nowhere", "path: got 'nowhere', expected a local folder with a config.json, or a .gguf file"),
    "another model": (lambda weights: folder_of("qwen3"), "expected the loaded model's"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_weights_change_nothing(case: str) -> None:
    change, message = REFUSED[case]
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        before = [parameter.clone() for parameter in engine._parts.models.target.parameters()]  # type: ignore[attr-defined]
        cached(engine)
        with pytest.raises(ValueError, match=message):
            engine.update_weights(change(dict(other(FAMILY).named_parameters())))
        assert all(map(torch.equal, before, engine._parts.models.target.parameters()))  # type: ignore[attr-defined]
        assert cached(engine) == 36


def test_an_update_from_another_thread_than_the_stepping_one(new_folder: Path) -> None:
    """Both step; all events are returned by the steps of this thread."""
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine, ThreadPoolExecutor(1) as pool:
        old = engine.generate(PROMPTS[0], max_new_tokens=20).tokens
        jobs, events = [engine.submit(PROMPTS[0], max_new_tokens=20)], engine.step()
        updated = pool.submit(engine.update_weights, new_folder)
        while not updated.done() or engine.has_work:
            events += engine.step()
            if len(jobs) < 50 and not updated.done():
                jobs.append(engine.submit(PROMPTS[0], max_new_tokens=20))
        updated.result()
        new = engine.generate(PROMPTS[0], max_new_tokens=20).tokens
        changed = [job.tokens for job in jobs].index(new) if jobs[-1].tokens == new else len(jobs)
        assert [job.tokens for job in jobs] == [old] * changed + [new] * (len(jobs) - changed) and jobs[0].tokens == old != new
        for job in jobs:
            assert [token for event in events if event.job_id == job.id for token in event.tokens] == job.tokens
    with pytest.raises(EngineClosedError, match=r"Engine.update_weights\(\): the engine was closed"):
        engine.update_weights(new_folder)


def test_a_copy_that_fails_closes_the_engines_of_the_model(new_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file cannot be read again after all tensors were checked. An engine with another model continues."""
    read, reads = SafetensorsSource.read, collections.Counter[str]()

    def failing(source: SafetensorsSource, name: str) -> Tensor:
        reads[name] += 1
        if reads[name] == 2 and "layers.2.mlp.down_proj" in name:
            raise OSError("the disk is gone")
        return read(source, name)

    engine, separate = (Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) for _ in range(2))
    with engine, separate, Engine(engine._parts.models.target, "ngram", vocabulary=engine.vocabulary, config=CONFIG) as sharing:
        jobs = [each.submit(PROMPTS[0], max_new_tokens=4) for each in (engine, sharing, separate)]
        sharing.step()
        monkeypatch.setattr(SafetensorsSource, "read", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            engine.update_weights(new_folder)
        for each, job in zip((engine, sharing), jobs, strict=False):
            assert (job.finish_reason, job.error) == (FinishReason.ERROR, "OSError: the disk is gone")
            with pytest.raises(EngineClosedError, match="the disk is gone"):
                each.submit(PROMPTS[0])
        finish(separate)
        assert len(jobs[2].tokens) == 4


def test_an_async_engine_reports_an_update_that_fails(new_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a close by its owner, after which a server or a replica would go on without an engine."""
    read, reads = SafetensorsSource.read, collections.Counter[str]()

    def failing(source: SafetensorsSource, name: str) -> Tensor:
        reads[name] += 1
        if reads[name] == 2:
            raise OSError("the disk is gone")
        return read(source, name)

    async def run(engine: Engine) -> None:
        serving = AsyncEngine(engine)
        await serving.open()
        monkeypatch.setattr(SafetensorsSource, "read", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            await asyncio.to_thread(engine.update_weights, new_folder)
        await serving.wait_closed()
        assert isinstance(serving.failure, OSError)
        with pytest.raises(EngineClosedError, match="the engine failed: OSError: the disk is gone"):
            serving.generate(PROMPTS[0])
        with pytest.raises(OSError, match="the disk is gone"):
            await serving.close()

    with Engine.from_pretrained(folder_of(FAMILY), None, config=CONFIG) as engine:
        asyncio.run(run(engine))


def test_a_folder_without_a_tensor_is_refused(tmp_path: Path) -> None:
    model = other(FAMILY)
    folder = save(model, tmp_path, state_dict={name: each for name, each in model.state_dict().items() if name != "model.norm.weight"})
    for implementation in ("native", "transformers"):
        with (
            Engine.from_pretrained(folder_of(FAMILY), None, config=CONFIG, implementation=implementation) as engine,
            pytest.raises(ValueError, match=r"model\.norm\.weight is missing"),
        ):
            engine.update_weights(folder)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_different_values_for_a_tied_weight_are_refused(implementation: Implementation) -> None:
    weights = {name: each.detach().clone() for name, each in other("smollm2").state_dict().items()}
    weights["lm_head.weight"] += 1
    with (
        Engine.from_pretrained(folder_of("smollm2"), None, config=CONFIG, implementation=implementation) as engine,
        pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, expected equal values"),
    ):
        engine.update_weights(weights)


def test_parameters_in_other_memory_are_refused() -> None:
    with Engine.from_pretrained(folder_of(FAMILY), None, config=CONFIG) as engine:
        norm = engine._parts.models.target.norm  # type: ignore[attr-defined]
        norm.data = norm.data.clone()
        with pytest.raises(ValueError, match=r"model\.norm\.weight: the parameter got other memory since the engine was made"):
            engine.update_weights(other(FAMILY).named_parameters())


def test_a_quantised_folder_is_dequantised_as_when_loaded(tmp_path: Path) -> None:
    model = random_model("Llama", BASE | SIZES, seed=1)
    folder = save(model, tmp_path / "plain")
    write(tmp_path, "FP8 per tensor", model)
    with Engine.from_pretrained(folder, "ngram", config=CONFIG) as engine:
        before = texts(engine)
        engine.update_weights(tmp_path)
        assert texts(engine) == expected_texts(tmp_path, dtype=torch.float32) != before


@needs_c
def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    model = random_model("Llama", BASE | SIZES, seed=1)
    model.load_state_dict(write(tmp_path, "FP8 per tensor", model))
    with Engine.from_pretrained(tmp_path, None, config=CONFIG, weights="quantised") as engine:
        for weights in (model.named_parameters(), tmp_path):
            with pytest.raises(ValueError, match=r"got new values for quantised weights, expected an engine with weights='dequantised'"):
                engine.update_weights(weights)


def test_engines_that_keep_their_weights_are_refused(tmp_path: Path) -> None:
    weights = dict(other(FAMILY).named_parameters())
    with (
        Engine.from_pretrained(folder_of(FAMILY), None, config=CONFIG, record=tmp_path / "run.jsonl") as engine,
    ):
        for call in (lambda: engine.update_weights(weights), engine.reset_prefix_cache):
            with pytest.raises(ValueError, match="got an engine with record, expected one without it"):
                call()
    with (
        Engine.from_pretrained(folder_of(FAMILY), None, config=replace(CONFIG, save_hidden_states=tmp_path / "states")) as engine,
        pytest.raises(ValueError, match="got an engine with save_hidden_states, expected one without it"),
    ):
        engine.update_weights(weights)
    with (
        Engine(ToyTarget(8), config=EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=16)) as engine,
        pytest.raises(ValueError, match=r"tensors that the model does not have, such as 'model\.embed_tokens\.weight'"),
    ):
        engine.update_weights(weights)


def test_sampled_texts_equal_those_of_a_fresh_engine(new_folder: Path) -> None:
    sampling, config = SamplingParams(temperature=0.9, seed=4), replace(CONFIG, greedy_only=False)
    with (
        Engine.from_pretrained(folder_of(FAMILY), None, config=config) as engine,
        Engine.from_pretrained(new_folder, None, config=config) as fresh,
    ):
        engine.update_weights(new_folder)
        found, expected = (each.generate(PROMPTS[1], max_new_tokens=20, sampling=sampling).tokens for each in (engine, fresh))
        assert found == expected
