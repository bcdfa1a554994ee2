"""The delta codec: any two tensors, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rollout_service.delta_codec import (
    HEADER_BYTES,
    NO_BASE,
    DeltaMismatch,
    Method,
    Words,
    checksum,
    decode,
    encode,
    peek,
)

WIDTHS = (1, 2, 4, 8)
# Both zeros, infinities, NaNs with and without a payload, the smallest subnormal: of bfloat16, by their bits.
SPECIAL = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x0001, 0x3F80], np.uint16)


def apply(old: Words | None, data: bytes) -> tuple[Method, Words]:
    """What a receiver with `old` makes of `data`."""
    held = None if old is None else old.copy()
    like = np.empty(peek_size(old, data), held.dtype if held is not None else np.uint16)
    method, used, result = decode(memoryview(data), lambda base: held if base == checksum_of(held) else None, like)
    assert used == len(data)
    words = like if method is Method.RAW else held
    assert words is not None and checksum(words) == result
    return method, words


def peek_size(old: Words | None, data: bytes) -> int:
    return old.size if old is not None else (len(data) - HEADER_BYTES) // 2


def checksum_of(words: Words | None) -> bytes:
    return NO_BASE if words is None else checksum(words)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Words, Words]:
    width = draw(st.sampled_from(WIDTHS))
    dtype = np.dtype(f"<u{width}")
    old = draw(arrays.arrays(dtype, st.integers(0, 400)))
    kind = draw(st.sampled_from(["same", "few", "many", "run", "other"]))
    new = old.copy()
    if kind == "other":
        new = draw(arrays.arrays(dtype, old.shape))
    elif old.size and kind != "same":
        count = {"few": min(3, old.size), "many": old.size * 2 // 3, "run": old.size // 2}[kind]
        start = draw(st.integers(0, old.size - 1))
        step = 1 if kind == "run" else draw(st.integers(1, 97))
        where = (start + step * np.arange(count)) % old.size
        flips = draw(arrays.arrays(dtype, (count,), elements=st.integers(0, 2 ** (8 * width) - 1)))
        new[where] ^= flips
    return old, new


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_any_change_comes_back_bit_for_bit_and_never_larger_than_the_tensor(pair: tuple[Words, Words]) -> None:
    old, new = pair
    encoded = encode(old, checksum(old), new)
    assert len(encoded.data) <= new.nbytes + HEADER_BYTES
    assert encoded.changed == int((old != new).sum())
    assert encoded.checksum == checksum(new)
    assert peek(memoryview(encoded.data)) == (encoded.method, len(encoded.data), encoded.checksum)
    method, got = apply(old, encoded.data)
    assert method is encoded.method
    assert got.tobytes() == new.tobytes()


@given(st.lists(st.sampled_from(range(9)), max_size=200), st.lists(st.sampled_from(range(9)), max_size=200))
@settings(deadline=None)
def test_nans_with_payloads_negative_zeros_and_infinities_survive(first: list[int], second: list[int]) -> None:
    size = min(len(first), len(second))
    old, new = SPECIAL[first[:size]], SPECIAL[second[:size]]
    _, got = apply(old, encode(old, checksum(old), new).data)
    assert got.tobytes() == new.tobytes()


@given(arrays.arrays(np.uint16, st.integers(0, 300)))
@settings(deadline=None)
def test_without_a_base_the_tensor_travels_as_it_is(new: Words) -> None:
    encoded = encode(None, NO_BASE, new)
    assert encoded.method is Method.RAW
    assert len(encoded.data) == new.nbytes + HEADER_BYTES
    assert apply(None, encoded.data)[1].tobytes() == new.tobytes()


@pytest.mark.parametrize(
    ("density", "method", "limit"),
    [(0.0, Method.SAME, 0.0), (0.001, Method.SPARSE, 0.002), (0.05, Method.SPARSE, 0.035), (0.65, Method.XOR, 0.25)],
)
def test_the_smallest_way_is_chosen(density: float, method: Method, limit: float) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 200_000, dtype=np.uint16)
    chosen = random.random(old.size) < density
    new = np.where(chosen, old ^ random.choice(np.array([1, 3, 7], np.uint16), old.size), old).astype(np.uint16)
    encoded = encode(old, checksum(old), new)
    assert encoded.method is method
    assert len(encoded.data) - HEADER_BYTES <= limit * new.nbytes


def test_noise_is_sent_as_it_is() -> None:
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 2**16, 10_000, dtype=np.uint16) for _ in range(2))
    encoded = encode(old, checksum(old), new)
    assert encoded.method is Method.RAW
    assert len(encoded.data) == new.nbytes + HEADER_BYTES


def test_a_scalar_and_an_empty_tensor() -> None:
    for old, new in ((torch.tensor(1.5), torch.tensor(float("nan"))), (torch.empty(0), torch.empty(0))):
        a, b = (tensor.reshape(-1).view(torch.uint8).numpy().view("<u4") for tensor in (old, new))
        assert apply(a, encode(a, checksum(a), b).data)[1].tobytes() == b.tobytes()


def test_a_receiver_at_another_version_is_told_before_anything_changes() -> None:
    old = np.arange(1000, dtype=np.uint16)
    new = old.copy()
    new[::50] += 1
    data = encode(old, checksum(old), new).data
    other = old + np.uint16(3)
    before = other.copy()
    with pytest.raises(DeltaMismatch, match="does not hold the version"):
        apply(other, data)
    assert (other == before).all()


@given(st.integers(0, 10**6), st.integers(0, 7))
@settings(deadline=None, max_examples=200)
def test_a_wrong_bit_anywhere_in_the_body_is_found_or_harmless(position: int, bit: int) -> None:
    old = np.arange(3000, dtype=np.uint16)
    new = old.copy()
    new[::7] ^= 5
    data = bytearray(encode(old, checksum(old), new).data)
    data[HEADER_BYTES + position % (len(data) - HEADER_BYTES)] ^= 1 << bit
    try:
        _, got = apply(old, bytes(data))
    except DeltaMismatch:
        return
    assert got.tobytes() == new.tobytes()  # a bit of a compressed frame that means nothing
