"""Numbers spread evenly over parts that have limited room: the two algorithms behind a plan.

`spread` is the largest-first greedy rule (Graham 1969, within 4/3 of the optimum), with a limit on the size of a part. What it leaves
uneven, `even_out` removes by exchanging items between the costliest part and another: of hundreds of items, eight to a part, the
costliest part then stays within a few parts in ten thousand of the mean. `best_fit` only looks for few parts and packs tightly.

Items are indices into `size` and `cost`. All arithmetic is on integers and ties are broken by position, so the result depends on
nothing but the arguments. Pure Python: at a few thousand items the lists are too short for arrays to pay.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

Parts = list[list[int]]

_Held = tuple[int, int, int]  # cost, size, item
_NOTHING: _Held = (0, 0, -1)  # what is handed over for an item that is moved and not exchanged


def spread(
    items: Sequence[int], size: Sequence[int], cost: Sequence[int], parts: int, room: int, offsets: Sequence[int] = ()
) -> Parts | None:
    """Each item to the part with the least cost among those that have room.

    Args:
        items: by descending size.
        size: what an item takes of a part's `room`.
        cost: what is balanced.
        offsets: cost that each part starts with, `[parts]`; nothing is 0.

    Returns:
        The items of each part in the order they came; None if one of them finds no room, which says nothing about
        other ways to place them.
    """
    content: Parts = [[] for _ in range(parts)]
    free = [room] * parts
    heap = sorted((offset, part) for part, offset in enumerate(offsets or [0] * parts))
    # Parts that were cheapest while too full for the item at hand, roomiest first; they come back for smaller items.
    waiting: list[tuple[int, int, int]] = []
    for item in items:
        needed = size[item]
        while waiting and -waiting[0][0] >= needed:
            _, total, part = heappop(waiting)
            heappush(heap, (total, part))
        while heap and free[heap[0][1]] < needed:
            total, part = heappop(heap)
            heappush(waiting, (-free[part], total, part))
        if not heap:
            return None
        total, part = heap[0]
        heapreplace(heap, (total + cost[item], part))
        free[part] -= needed
        content[part].append(item)
    return content


def best_fit(items: Sequence[int], size: Sequence[int], room: int) -> Parts:
    """Each item to the fullest part that has room for it, or to a new one; close to the fewest parts if items descend in size."""
    content: Parts = []
    free: list[tuple[int, int]] = []
    for item in items:
        position = bisect_left(free, (size[item], -1))
        if position < len(free):
            left, part = free.pop(position)
        else:
            left, part = room, len(content)
            content.append([])
        insort(free, (left - size[item], part))
        content[part].append(item)
    return content


def even_out(parts: Parts, size: Sequence[int], cost: Sequence[int], room: int, target: int) -> Parts:
    """Lower the highest cost of a part to `target`, or as far as moving one item or exchanging two can.

    The costliest part deals with the cheapest one that helps. Of all deals between the two, the one that leaves the lower maximum is
    taken; so the highest cost never rises, and nothing else about the parts is promised.

    Args:
        size, cost: a costlier item may not be smaller.
        room: most that the sizes of a part may add up to; holds before and afterwards.

    Returns:
        The items of each part by descending cost.
    """
    held = [sorted([_NOTHING, *((cost[i], size[i], i) for i in part)]) for part in parts]
    used = [sum(size[i] for i in part) for part in parts]
    ranking = sorted((sum(item[0] for item in of_part), part) for part, of_part in enumerate(held))
    while ranking[-1][0] > target:
        highest, giver = ranking[-1]
        offers = (
            (place, taker, _best_deal(held[giver], held[taker], room - used[taker], highest - lowest))
            for place, (lowest, taker) in enumerate(ranking[:-1])
        )
        place, taker, deal = next((offer for offer in offers if offer[2] is not None), (0, 0, None))
        if deal is None:
            break
        given, returned = deal
        for source, sink, item in ((giver, taker, given), (taker, giver, returned)):
            if item is not _NOTHING:
                held[source].remove(item)
                insort(held[sink], item)
                used[source] -= item[1]
                used[sink] += item[1]
        ranking.pop()
        lowest, _ = ranking.pop(place)
        insort(ranking, (highest - given[0] + returned[0], giver))
        insort(ranking, (lowest + given[0] - returned[0], taker))
    return [[i for _, _, i in of_part[:0:-1]] for of_part in held]


def _best_deal(giver: list[_Held], taker: list[_Held], free: int, gap: int) -> tuple[_Held, _Held] | None:
    """What to hand over and what to get back to bring two parts whose costs differ by `gap` closest together; None if nothing does.

    Both lists ascend from `_NOTHING`. The taker has `free` room left; the giver gets smaller.
    """
    best, deal = gap, None
    half, last = gap // 2, len(taker) - 1
    position = 0
    for given in giver[1:]:
        # The ideal return is cheaper by half the gap, or costlier where room is short: look at the items around it.
        ideal, least_size = given[0] - half, given[1] - free
        while position < last and (taker[position][0] < ideal or taker[position][1] < least_size):
            position += 1
        for returned in (taker[position], taker[position - 1]) if position else (taker[0],):
            left = abs(gap - 2 * (given[0] - returned[0]))
            if left < best and returned[1] >= least_size:
                best, deal = left, (given, returned)
    return deal
