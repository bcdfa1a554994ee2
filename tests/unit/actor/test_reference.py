"""The reference policy's copy of the weights."""

from __future__ import annotations

import torch

from dapo_megatron.actor.reference import ReferenceWeights


def test_the_reference_keeps_the_router_bias_that_it_began_with() -> None:
    router = torch.nn.Linear(3, 2)
    router.register_buffer("expert_bias", torch.tensor([1.0, 2.0]))
    router.register_buffer("local_tokens_per_expert", torch.zeros(2))
    model = torch.nn.ModuleDict({"router": router})
    reference = ReferenceWeights([model])
    initial = router.weight.detach().clone()
    with torch.no_grad():
        router.weight.add_(1.0)
        router.expert_bias.add_(5.0)
        router.local_tokens_per_expert.add_(7.0)
    with reference.swapped_in():
        assert torch.equal(router.weight, initial)
        assert router.expert_bias.tolist() == [1.0, 2.0]
        assert router.local_tokens_per_expert.tolist() == [7.0, 7.0], "a count of this step is no weight"
    assert torch.equal(router.weight, initial + 1.0)
    assert router.expert_bias.tolist() == [6.0, 7.0]
