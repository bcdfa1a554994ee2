"""What an engine is told of a bucket before its tensors come."""

from __future__ import annotations

from typing import NamedTuple

from dapo_megatron.resharder.gather import ShardedWeights
from dapo_megatron.resharder.plan import Bucket


class BucketTensors(NamedTuple):
    """HF names, dtypes as torch spells them without `torch.`, and shapes, in the order of `GatheredBucket.merge`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


def bucket_tensors(weights: ShardedWeights, bucket: Bucket) -> BucketTensors:
    tensors = BucketTensors([], [], [])
    for key in bucket.keys:
        entry = weights.mapping[key]
        tensors.names.extend(entry.hf)
        tensors.dtypes.extend([str(weights.tensor_dtype(key)).removeprefix("torch.")] * len(entry.hf))
        tensors.shapes.extend(list(shape) for shape in entry.hf_shapes)
    return tensors
