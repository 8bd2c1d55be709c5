"""The order of replicas: those that hold a prefix first, with bounded load; and the number of them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from stepgraph.runtime.replicas.router import FREE_PAGES, MAX_PAGES, PrefixRouter, page_hashes, scale

IDS = list(range(100))


def test_hashes_are_of_full_pages_with_all_pages_before_them() -> None:
    hashes = page_hashes(IDS, 16, ("a",))
    assert len(hashes) == len({*hashes}) == 6
    assert page_hashes(IDS[:95], 16, ("a",)) == hashes[:5] and page_hashes(IDS[:15], 16, ("a",)) == ()
    changed = page_hashes([*IDS[:20], 7, *IDS[21:]], 16, ("a",))
    assert changed[0] == hashes[0] and not {*changed[1:]} & {*hashes}
    assert len(page_hashes([1] * 100_000, 16, ())) == MAX_PAGES


@pytest.mark.parametrize("other", [("b",), ("a", "b"), (), ("",), ("'a', ",)])
def test_tenants_with_different_salts_share_no_hash(other: Any) -> None:
    assert not {*page_hashes(IDS, 16, ("a",))} & {*page_hashes(IDS, 16, other)}


def test_a_request_goes_to_the_replica_that_holds_most_of_its_prefix() -> None:
    router, loads = PrefixRouter(), {"a": 0, "b": 0, "c": 0}
    router.note(page_hashes(IDS[:32], 16, ()), "a")
    router.note(page_hashes(IDS[:64], 16, ()), "b")
    hashes = page_hashes(IDS, 16, ())
    assert router.rank(hashes, loads) == ["b", "a", "c"]
    assert router.rank(hashes, loads, avoid={"b"}) == ["a", "c"]
    assert router.rank(hashes, loads, avoid={*loads}) == ["b", "a", "c"]
    assert router.rank(hashes, {"a": 0, "c": 0}) == ["a", "c"]  # b has ended
    assert router.rank(page_hashes(IDS, 16, ("tenant",)), loads | {"a": 1, "b": 1})[0] == "c"


def test_a_held_page_counts_only_with_all_pages_before_it() -> None:
    router, hashes = PrefixRouter(), page_hashes(IDS, 16, ())
    router.note(hashes[1:], "a")
    router.note(hashes[:1], "b")
    assert router.rank(hashes, {"a": 0, "b": 0})[0] == "b"


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0, float("inf")])
def test_the_load_of_the_holder_is_bounded(factor: float) -> None:
    """One prefix for all requests: no replica exceeds the factor times the mean by more than the rounding."""
    router, hashes, loads = PrefixRouter(factor), page_hashes(IDS, 16, ()), dict.fromkeys("abcdefgh", 0)
    for count in range(1, 400):
        chosen = router.rank(hashes, loads)[0]
        router.note(hashes, chosen)
        loads[chosen] += 1
        assert max(loads.values()) <= factor * count / len(loads) + 1


def test_prefixes_stay_with_their_replicas_under_even_load() -> None:
    dice, router, loads = random.Random(3), PrefixRouter(2.0), dict.fromkeys("abcd", 0)
    prompts = [page_hashes([index] * 64, 16, ()) for index in range(40)]
    found: dict[int, set[str]] = {}
    running: list[str] = []
    for _ in range(2000):
        index = dice.randrange(len(prompts))
        chosen = router.rank(prompts[index], loads)[0]
        router.note(prompts[index], chosen)
        found.setdefault(index, set()).add(chosen)
        loads[chosen] += 1
        running.append(chosen)
        if len(running) > 16:
            loads[running.pop(0)] -= 1
    assert sum(map(len, found.values())) / len(found) < 2


def test_routers_of_several_processes_agree_on_a_new_prefix() -> None:
    names = [f"replica-{index}" for index in range(20)]
    choices = []
    for index in range(50):
        hashes = page_hashes([index] * 16, 16, ())
        first, second = (PrefixRouter().rank(hashes, dict.fromkeys(order, 0))[0] for order in (names, names[::-1]))
        assert first == second
        choices.append(first)
    assert len({*choices}) > 10


def test_memory_is_bounded_and_the_last_pages_are_forgotten_first() -> None:
    router = PrefixRouter(max_pages=4)
    hashes = page_hashes(IDS, 16, ())
    router.note(hashes, "a")
    assert len(router._holders) == 4
    assert router.rank(hashes[:4], {"a": 1, "b": 0, "c": 1})[0] == "a"
    router.note(page_hashes([5] * 64, 16, ()), "b")
    assert len(router._holders) == 4 and router.rank(hashes, {"a": 1, "b": 0, "c": 1})[0] == "b"


def test_wrong_settings_are_refused() -> None:
    for factor in (0.9, float("nan"), -1):
        with pytest.raises(ValueError, match=r"PrefixRouter.load_factor: got .*, expected a number >= 1"):
            PrefixRouter(factor)
    with pytest.raises(ValueError, match=r"PrefixRouter.max_pages: got 0, expected a whole number >= 1"):
        PrefixRouter(max_pages=0)


@pytest.mark.parametrize(
    ("requests", "running", "free", "wanted"),
    [
        (0, 2, {"a": 1.0}, 1),
        (8, 1, {}, 1),
        (8.1, 1, {}, 2),
        (40, 2, {"a": 0.5, "b": 0.5}, 5),
        (3, 2, {"a": 0.05, "b": 0.02}, 3),  # few requests hold nearly all pages
        (3, 2, {"a": 0.05, "b": 0.5}, 1),
        (3, 2, {"a": 0.05}, 1),  # nothing is known of one replica
    ],
)
def test_the_number_of_replicas_follows_requests_and_free_pages(requests: float, running: int, free: Any, wanted: int) -> None:
    metrics, config = {FREE_PAGES: free} if free else None, SimpleNamespace(target_ongoing_requests=8)
    context = SimpleNamespace(aggregated_metrics=metrics, total_num_requests=requests, config=config, current_num_replicas=running)
    assert scale(context) == (wanted, {})
