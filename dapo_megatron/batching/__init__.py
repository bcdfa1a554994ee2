"""From the samples of a step to packed micro-batches: who computes what (`plan`) and how it is laid out (`pack`)."""

from dapo_megatron.batching.pack import PackedBatch, pack
from dapo_megatron.batching.plan import MicroBatch, MiniBatch, estimated_cost, plan_step

__all__ = ["MicroBatch", "MiniBatch", "PackedBatch", "estimated_cost", "pack", "plan_step"]
