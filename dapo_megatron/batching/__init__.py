"""From the samples of a step to packed micro-batches: who computes what (`plan`) and how it is laid out (`pack`)."""

from dapo_megatron.batching.cost import CostModel
from dapo_megatron.batching.pack import PackedBatch, pack
from dapo_megatron.batching.plan import MicroBatch, MiniBatch, plan_step

__all__ = ["CostModel", "MicroBatch", "MiniBatch", "PackedBatch", "pack", "plan_step"]
