from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.batching import pack

IDS = st.lists(st.integers(1, 999), min_size=1, max_size=7)


def arrays(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.array(p, dtype=np.int32), np.array(r, dtype=np.int32)) for p, r in pairs]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(IDS, IDS), max_size=6), st.integers(1, 8))
def test_layout_equals_brute_force(pairs: list[tuple[list[int], list[int]]], multiple: int) -> None:
    packed = pack(arrays(pairs), multiple, pad_id=0)
    tokens, positions, rows, targets, owner, starts = [], [], [], [], [], [0]
    for i, (prompt, response) in enumerate(pairs):
        for position, token in enumerate([*prompt, *response]):
            if position >= len(prompt):
                rows.append(len(tokens) - 1)
                targets.append(token)
                owner.append(i)
            tokens.append(token)
            positions.append(position)
        starts.append(len(tokens))
    while not tokens or len(tokens) % multiple:
        positions.append(positions[-1] + 1 if positions else 0)
        tokens.append(0)
    if not pairs:
        starts.append(0)
    starts[-1] = len(tokens)

    assert packed.tokens.tolist() == [tokens] and packed.position_ids.tolist() == [positions]
    assert packed.cu_seqlens.tolist() == starts
    assert packed.rows.tolist() == rows and packed.targets.tolist() == targets and packed.sample_index.tolist() == owner
    assert packed.max_seqlen == max(b - a for a, b in zip(starts, starts[1:], strict=False))
    int64 = {
        packed.tokens.dtype,
        packed.position_ids.dtype,
        packed.rows.dtype,
        packed.targets.dtype,
        packed.sample_index.dtype,
    }
    assert int64 == {torch.int64} and packed.cu_seqlens.dtype == torch.int32
    # The token after each row is its target, within the same sequence.
    flat = packed.tokens[0]
    assert torch.equal(flat[packed.rows + 1], packed.targets)


def test_an_example() -> None:
    packed = pack(arrays([([10, 11], [12]), ([20], [21, 22])]), pad_to_multiple=4, pad_id=7)
    assert packed.tokens.tolist() == [[10, 11, 12, 20, 21, 22, 7, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert packed.cu_seqlens.tolist() == [0, 3, 8]
    assert packed.rows.tolist() == [1, 3, 4] and packed.targets.tolist() == [12, 21, 22]
    assert packed.sample_index.tolist() == [0, 1, 1] and packed.max_seqlen == 5


def test_the_pad_id_inside_a_sequence_is_an_ordinary_token() -> None:
    packed = pack(arrays([([0, 5], [0, 0])]), pad_to_multiple=1, pad_id=0)
    assert packed.targets.tolist() == [0, 0] and packed.rows.tolist() == [1, 2]


def test_no_sequence_still_gives_tokens_for_a_forward_pass() -> None:
    packed = pack([], pad_to_multiple=2, pad_id=3)
    assert packed.tokens.tolist() == [[3, 3]] and packed.cu_seqlens.tolist() == [0, 2]
    assert packed.rows.shape == packed.targets.shape == packed.sample_index.shape == (0,)


@pytest.mark.parametrize("pair", [([], [1]), ([1], [])])
def test_an_empty_prompt_or_response_is_refused_with_its_place(pair: tuple[list[int], list[int]]) -> None:
    with pytest.raises(ValueError, match="sequence 1 has . prompt and . response tokens"):
        pack(arrays([([1], [1]), pair]))
