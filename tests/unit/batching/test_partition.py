from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.batching.partition import Parts, best_fit, even_out, spread

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(lambda s: sorted(s, reverse=True))


def squares(size: list[int]) -> list[int]:
    return [s * s for s in size]


def totals(parts: Parts, of: list[int]) -> list[int]:
    return [sum(of[i] for i in part) for part in parts]


def assert_holds_each_once(parts: Parts, n: int, size: list[int], room: int) -> None:
    assert sorted(i for part in parts for i in part) == list(range(n))
    assert max(totals(parts, size)) <= room


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(1, 8), st.integers(0, 100))
def test_spread_keeps_to_the_room_or_says_that_it_is_stuck(size: list[int], parts: int, slack: int) -> None:
    room = max(size[0], -(-sum(size) // parts)) + slack
    result = spread(range(len(size)), size, squares(size), parts, room)
    if result is None:
        # A part with room for any item would have taken the one that got stuck.
        assert room * parts < sum(size) + parts * size[0]
    else:
        assert len(result) == parts
        assert_holds_each_once(result, len(size), size, room)


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(1, 8))
def test_spread_is_the_greedy_rule_when_there_is_room(size: list[int], parts: int) -> None:
    load = [0] * parts
    for s in size:
        load[load.index(min(load))] += s
    assert totals(spread(range(len(size)), size, size, parts, sum(size)) or [], size) == load


def test_a_part_that_is_too_full_comes_back_for_smaller_items() -> None:
    # After 6 and 5 the cheapest part (5 of 8 used) has no room for 4, which goes to the third; 3 then fits the second.
    assert spread(range(4), [6, 5, 4, 3], [6, 1, 9, 3], 3, 8) == [[0], [1, 3], [2]]


def test_offsets_are_filled_up_first() -> None:
    parts = spread(range(6), [1] * 6, [1] * 6, 3, 6, offsets=[-4, -2, 0])
    assert [len(part) for part in parts or []] == [4, 2, 0]


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(0, 60))
def test_best_fit_wastes_less_than_half_of_the_room(size: list[int], slack: int) -> None:
    room = size[0] + slack
    parts = best_fit(range(len(size)), size, room)
    assert_holds_each_once(parts, len(size), size, room)
    assert all(parts)
    assert len(parts) == 1 or 2 * sum(size) > room * (len(parts) - 1)


def test_best_fit_prefers_the_fullest_part() -> None:
    assert best_fit(range(4), [6, 5, 4, 3], 10) == [[0, 2], [1, 3]]


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(1, 6), st.integers(0, 60), st.randoms(use_true_random=False))
def test_even_out_never_makes_it_worse(size: list[int], parts: int, slack: int, rng: random.Random) -> None:
    cost = squares(size)
    before: Parts = [[] for _ in range(parts)]
    for i in range(len(size)):
        rng.choice(before).append(i)
    room = max(totals(before, size)) + slack
    after = even_out(before, size, cost, room, target=0)
    assert_holds_each_once(after, len(size), size, room)
    assert max(totals(after, cost)) <= max(totals(before, cost))
    # Nothing is left to gain: no move or exchange with the costliest part lowers the maximum.
    load = totals(after, cost)
    top = load.index(max(load))
    for part, given_item in itertools.product(range(parts), after[top]):
        if part != top and load.count(max(load)) == 1:
            for returned in [None, *after[part]]:
                change = cost[given_item] - (0 if returned is None else cost[returned])
                grows = size[given_item] - (0 if returned is None else size[returned])
                fits = sum(size[i] for i in after[part]) + grows <= room
                assert not fits or change <= 0 or load[part] + change >= load[top]


def test_even_out_takes_a_lesser_deal_where_the_best_one_finds_no_room() -> None:
    # Moving the 4 would balance the squares best, but the second part has room for one more unit only: the 4 comes for a 3.
    size = [9, 6, 4, 3, 3]
    assert even_out([[0, 2], [1, 3, 4]], size, squares(size), 13, target=75) == [[0, 3], [1, 2, 4]]


def test_even_out_stops_at_the_target() -> None:
    parts = [[0, 1, 2, 3], []]
    assert sorted(map(len, even_out(parts, [1] * 4, [1] * 4, 4, target=4))) == [0, 4]
    assert sorted(map(len, even_out(parts, [1] * 4, [1] * 4, 4, target=2))) == [2, 2]


def test_even_out_finds_a_perfect_division_that_greedy_misses() -> None:
    size = [8, 7, 6, 5, 4]  # greedy: 8 + 5 + 4 against 7 + 6
    greedy = spread(range(5), size, size, 2, 30)
    assert greedy is not None and sorted(totals(greedy, size)) == [13, 17]
    assert totals(even_out(greedy, size, size, 30, target=15), size) == [15, 15]


@pytest.mark.parametrize("parts", [32, 64])
def test_eight_items_a_part_come_within_a_thousandth(parts: int) -> None:
    rng = random.Random(parts)
    size = sorted((min(20000, round(rng.lognormvariate(8, 0.8))) for _ in range(8 * parts)), reverse=True)
    cost = [s * (50000 + s) for s in size]
    mean = sum(cost) // parts
    greedy = spread(range(len(size)), size, cost, parts, sum(size))
    assert greedy is not None and max(totals(greedy, cost)) > 1.001 * mean
    assert max(totals(even_out(greedy, size, cost, sum(size), mean * 1001 // 1000), cost)) <= 1.001 * mean + 1
