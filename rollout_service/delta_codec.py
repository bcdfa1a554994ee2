"""What has changed in a tensor, in few bytes and without loss. Used by the trainer and inside the engines.

A tensor is seen as a row of words, unsigned integers as wide as its numbers, so that every bit pattern survives (negative
zero, the payload of a NaN). With `flipped = old XOR new`, a tensor is sent as the smallest of

    SAME    nothing
    SPARSE  the gaps between changed words, and `flipped` at those words
    XOR     `flipped` of all words
    RAW     the new words

Gaps and flipped words are cut into byte planes (all lowest bytes, then all second bytes, ...), which makes the mostly empty
planes vanish, and compressed with zstd. Each tensor is led by 64 bytes: method, lengths, and the XXH3-128 of the
bytes that the receiver must hold before and will hold after. So an encoding is never longer than the tensor and 64 bytes,
a receiver that is at another version finds out before it changes anything, and one that has the result already is left alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

Words = NDArray[np.unsignedinteger]

_HEADER = struct.Struct(
    "<BB6xQQQ16s16s"
)  # method, bytes of a gap, changed words, bytes of gaps, of words, both checksums
HEADER_BYTES = _HEADER.size
NO_BASE = bytes(16)  # the base of an encoding that needs none

# zstd's fastest regular level: the planes hold little but zeros or noise, where higher levels gain under 2%.
_ZSTD = pa.Codec("zstd", compression_level=1)
# Above this share of changed words the gaps cost more than the zeros that they save; below the other one, less.
_SPARSE_BELOW = 0.7
_XOR_ABOVE = 0.3


class Method(IntEnum):
    SAME = 0
    SPARSE = 1
    XOR = 2
    RAW = 3


class DeltaMismatch(Exception):
    """The receiver holds other bytes than the encoding starts from, or the result has another checksum."""


@dataclass(frozen=True)
class Encoded:
    """One tensor on its way.

    Attributes:
        data: header and body.
        method: how the body is to be read.
        changed: words that differ from the base; all of them without a base.
        checksum: of the new bytes.
    """

    data: bytes
    method: Method
    changed: int
    checksum: bytes


def checksum(words: Words) -> bytes:
    """XXH3-128 of the bytes in memory."""
    return xxhash.xxh3_128_digest(memoryview(words.view(np.uint8)))  # type: ignore[arg-type]


def encode(old: Words | None, old_checksum: bytes, new: Words) -> Encoded:
    """Encode `new`, a flat array, against `old` of the same length and dtype; without `old`, as it is.

    `old_checksum` is the checksum of `old`, which the caller keeps with it.
    """
    if old is None:
        result = checksum(new)
        return _encoded(Method.RAW, 0, new.size, b"", new.tobytes(), NO_BASE, result)
    flipped = np.bitwise_xor(old, new)
    where = np.flatnonzero(flipped != 0)
    if not where.size:
        return _encoded(Method.SAME, 0, 0, b"", b"", old_checksum, old_checksum)
    result = checksum(new)
    density = where.size / new.size
    best: tuple[Method, int, bytes, bytes] = (Method.RAW, 0, b"", b"")
    size = new.nbytes
    if density < _SPARSE_BELOW:
        gaps = np.diff(where, prepend=-1) - 1
        width = next(width for width in (1, 2, 4, 8) if int(gaps.max()) < 1 << 8 * width)
        first, second = _compress(gaps.astype(f"<u{width}")), _compress(flipped[where])
        if len(first) + len(second) < size:
            best, size = (Method.SPARSE, width, first, second), len(first) + len(second)
    if density > _XOR_ABOVE:
        second = _compress(flipped)
        if len(second) < size:
            best = (Method.XOR, 0, b"", second)
    method, width, first, second = best
    if method is Method.RAW:
        return _encoded(method, 0, int(where.size), b"", new.tobytes(), NO_BASE, result)
    return _encoded(method, width, int(where.size), first, second, old_checksum, result)


def decode(data: memoryview, take_base: Callable[[bytes], Words | None], like: Words) -> tuple[Method, int, bytes]:
    """Bring one tensor to its new state.

    Args:
        data: starts with the tensor's header; what follows its body is left alone.
        take_base: called once with the base's checksum; gives the words to start from, which are changed in place, or None
            when the receiver does not hold them.
        like: where the result of RAW goes; also says how many words of which width there are.

    Returns:
        The method, bytes of `data` that were used, and the checksum of the result, which is in the base's memory or in `like`.

    Raises:
        DeltaMismatch: there is no such base, or the result is not what was sent; then the base is spoilt.
    """
    method, width, count, first_bytes, second_bytes, base, result = _HEADER.unpack_from(data)
    used = HEADER_BYTES + first_bytes + second_bytes
    body = data[HEADER_BYTES:used]
    method = Method(method)
    if method is Method.RAW:
        if second_bytes != like.nbytes:
            raise DeltaMismatch(f"{second_bytes} bytes came for {like.nbytes}")
        like.view(np.uint8)[:] = np.frombuffer(body, np.uint8)
        words = like
    else:
        held = take_base(base)
        if held is None or held.size != like.size or held.dtype != like.dtype:
            raise DeltaMismatch("the receiver does not hold the version that the change starts from")
        words = held
        if method is Method.SAME:
            return method, used, result
        flipped = _decompress(body[first_bytes:], count if method is Method.SPARSE else words.size, words.itemsize)
        if method is Method.XOR:
            np.bitwise_xor(words, flipped, out=words)
        else:
            gaps = _decompress(body[:first_bytes], count, width).astype(np.int64)
            where = np.cumsum(gaps + 1) - 1
            if where[-1] >= words.size:
                raise DeltaMismatch("a change lies outside the tensor")
            words[where] ^= flipped
    if checksum(words) != result:
        raise DeltaMismatch("the result has another checksum")
    return method, used, result


def peek(data: memoryview) -> tuple[Method, int, bytes]:
    """Method, bytes with the header, and the checksum of the result of the tensor that `data` starts with."""
    method, _, _, first_bytes, second_bytes, _, result = _HEADER.unpack_from(data)
    return Method(method), HEADER_BYTES + first_bytes + second_bytes, result


def _encoded(
    method: Method, width: int, changed: int, first: bytes, second: bytes, base: bytes, result: bytes
) -> Encoded:
    header = _HEADER.pack(method, width, changed, len(first), len(second), base, result)
    return Encoded(b"".join((header, first, second)), method, changed, result)


def _compress(words: Words) -> bytes:
    planes = words.view(np.uint8).reshape(-1, words.itemsize).T
    compressed: bytes = _ZSTD.compress(np.ascontiguousarray(planes).reshape(-1), asbytes=True)
    return compressed


def _decompress(data: memoryview, count: int, itemsize: int) -> Words:
    try:
        planes = np.frombuffer(_ZSTD.decompress(data, decompressed_size=count * itemsize), np.uint8)
    except (OSError, pa.ArrowInvalid) as error:
        raise DeltaMismatch(f"what came cannot be decompressed: {error}") from error
    if planes.size != count * itemsize:
        raise DeltaMismatch(f"{planes.size} bytes came out for {count * itemsize}")
    words = np.ascontiguousarray(planes.reshape(itemsize, count).T).reshape(-1)
    return words.view(f"<u{itemsize}")
