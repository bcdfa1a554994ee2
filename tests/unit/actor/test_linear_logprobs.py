"""The fused output layer and log-softmax against a float64 reference: values, gradients, precision and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dapo_megatron.actor import logprobs as module
from dapo_megatron.actor.logprobs import linear_logprobs
from tests.ranks import run_ranks

# Tiles are at least 64 columns wide: three blocks of the vocabulary, the last one narrow.
VOCAB, PADDED, HIDDEN, ROWS = 150, 192, 12, 9
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TILE_ELEMENTS", 64)


def _inputs(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets, and what the loss takes of each log-prob and of each entropy."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (rows,), generator=g)
    return hidden, weight, targets, torch.randn(rows, generator=g), torch.randn(rows, generator=g)


def _reference(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Float64, all at once; gradients flow into the arguments."""
    logp = torch.log_softmax((hidden.double() @ weight.double().t())[:, :VOCAB] / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _gradients(pair: tuple[Tensor, Tensor], per_logprob: Tensor, per_entropy: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((pair[0] * per_logprob).sum() + (pair[1] * per_entropy).sum(), of))


@pytest.mark.parametrize("chunk", [1, 4, 9, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_float32_equals_a_float64_softmax_with_gradients(chunk: int, temperature: float) -> None:
    hidden, weight, targets, per_logprob, per_entropy = _inputs()
    expected = _reference(hidden, weight, targets, temperature)
    actual = linear_logprobs(hidden, weight, targets, temperature=temperature, vocab_size=VOCAB, chunk=chunk)
    for ours, reference in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), reference, **TOLERANCE)
    grad_hidden, grad_weight = _gradients(actual, per_logprob, per_entropy, hidden, weight)
    expected_hidden, expected_weight = _gradients(expected, per_logprob, per_entropy, hidden, weight)
    torch.testing.assert_close(grad_hidden, expected_hidden, **TOLERANCE)
    torch.testing.assert_close(grad_weight, expected_weight, **TOLERANCE)
    assert grad_weight[VOCAB:].abs().max() == 0, "padding rows of the output layer must take no gradient"


def test_float64_gradients_equal_finite_differences() -> None:
    hidden, weight, targets, *_ = _inputs(torch.float64, rows=3)
    hidden, weight = hidden.detach()[:, :4].requires_grad_(), (weight.detach()[:70, :4] / 2).requires_grad_()
    targets = targets % 67

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(hidden, weight, targets, temperature=0.7, vocab_size=67, chunk=2)

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("kept", [0, 1], ids=["logprobs", "entropy"])
def test_one_of_the_two_results_alone_has_its_own_gradient(kept: int) -> None:
    hidden, weight, targets, *_ = _inputs()
    ours = linear_logprobs(hidden, weight, targets, temperature=0.7, vocab_size=VOCAB, chunk=4)[kept].sum()
    reference = _reference(hidden, weight, targets, 0.7)[kept].sum()
    expected = torch.autograd.grad(reference, (hidden, weight))
    for actual, wanted in zip(torch.autograd.grad(ours, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(actual, wanted, **TOLERANCE)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_takes_no_gradient_and_the_other_one_is_right(frozen: str) -> None:
    hidden, weight, targets, per_logprob, per_entropy = _inputs()
    trained = weight if frozen == "hidden" else hidden
    (wanted,) = _gradients(_reference(hidden, weight, targets, 1.0), per_logprob, per_entropy, trained)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    pair = linear_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB, chunk=4)
    (actual,) = _gradients(pair, per_logprob, per_entropy, trained)
    torch.testing.assert_close(actual, wanted, **TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("wide", [False, True], ids=["close together", "far apart"])
def test_logits_of_ten_thousand_lose_no_digit(temperature: float, wide: bool) -> None:
    # Whole numbers: the product is exact in float32, so that what follows has to be, too. The logits of a row are near
    # 10,000 or -10,000, or anywhere between them.
    g = torch.Generator().manual_seed(0)
    hidden = torch.tensor([[100.0, 1.0], [-100.0, 1.0], [100.0, -1.0]], requires_grad=True)
    level = torch.randint(-100, 101, (PADDED,), generator=g).float() if wide else torch.full((PADDED,), 100.0)
    weight = torch.stack((level, torch.randint(-3, 4, (PADDED,), generator=g).float()), 1).requires_grad_()
    targets = torch.tensor([int((hidden[i] @ weight[:VOCAB].t()).argmax()) for i in range(3)])
    ours = linear_logprobs(hidden, weight, targets, temperature=temperature, vocab_size=VOCAB, chunk=2)
    reference = _reference(hidden, weight, targets, temperature)
    ones = torch.ones(3)
    for actual, wanted in zip(ours, reference, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-5, atol=1e-6)
    for actual, wanted in zip(
        _gradients(ours, ones, ones, hidden, weight), _gradients(reference, ones, ones, hidden, weight), strict=True
    ):
        # The gradient of a hidden state adds up terms of the size of 100 that cancel out.
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("chunk", [4, 1024])
def test_bfloat16_equals_a_bfloat16_linear_layer_and_a_float32_softmax(chunk: int) -> None:
    hidden, weight, targets, per_logprob, per_entropy = _inputs(torch.bfloat16)
    logp = torch.log_softmax(torch.nn.functional.linear(hidden, weight)[:, :VOCAB].float() / 0.7, -1)
    plain = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    ours = linear_logprobs(hidden, weight, targets, temperature=0.7, vocab_size=VOCAB, chunk=chunk)
    for actual, wanted in zip(ours, plain, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, wanted, **TOLERANCE)
    exact = _gradients(_reference(hidden, weight, targets, 0.7), per_logprob, per_entropy, hidden, weight)
    for actual, wanted in zip(_gradients(ours, per_logprob, per_entropy, hidden, weight), exact, strict=True):
        assert actual.dtype == torch.bfloat16
        error = (actual.float() - wanted.float()).abs().max() / wanted.float().abs().max()
        assert error < 2**-6, f"relative error {error}"


def test_weight_gradient_in_bfloat16_does_not_decay_with_the_number_of_chunks() -> None:
    # 256 equal rows: a bfloat16 sum of 256 terms would stop growing.
    hidden, weight, *_ = _inputs(torch.bfloat16)
    hidden = hidden.detach()[:1].repeat(256, 1)
    targets = torch.full((256,), 5)
    grads = []
    for chunk in (256, 1):
        logprobs, _ = linear_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB, chunk=chunk)
        grads.append(torch.autograd.grad(logprobs.sum(), weight)[0].float())
    torch.testing.assert_close(grads[1], grads[0], rtol=2**-7, atol=1e-3)


def test_hidden_states_of_another_dtype_get_their_gradient_in_it() -> None:
    hidden, weight, targets, *_ = _inputs()
    low = hidden.detach().bfloat16().requires_grad_()
    logprobs, _ = linear_logprobs(low, weight, targets, temperature=1.0, vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(logprobs.sum(), low)
    (wanted,) = torch.autograd.grad(_reference(low, weight, targets, 1.0)[0].sum(), low)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad, wanted, rtol=2**-7, atol=1e-3)


def test_no_row_at_all_gives_empty_results_and_zero_gradients() -> None:
    hidden, weight, targets, *_ = _inputs(rows=0)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature=0.7, vocab_size=VOCAB)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, HIDDEN)
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros(PADDED, HIDDEN))


def test_an_id_outside_of_the_vocabulary_is_not_a_number() -> None:
    hidden, weight, targets, *_ = _inputs()
    targets[2], targets[5] = VOCAB, -1
    logprobs, entropy = linear_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB)
    assert logprobs.isnan().nonzero().flatten().tolist() == [2, 5]
    assert entropy.isfinite().all()


def _on_rank() -> dict[str, Any]:
    import torch.distributed as dist

    module._TILE_ELEMENTS = 64
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair_of_ranks = dist.new_group([0, 1])
    results = {}
    # With 120 ids, the slice of rank 1 of 3 is padding in part, and that of rank 2 altogether.
    for name, vocab, group, size, rows in (
        ("tp2", VOCAB, pair_of_ranks, 2, ROWS),
        ("tp3", 120, dist.group.WORLD, 3, ROWS),
        ("tp3 without rows", 120, dist.group.WORLD, 3, 0),
    ):
        if rank >= size:
            continue
        hidden, weight, targets, per_logprob, per_entropy = _inputs(rows=rows)
        part = weight.detach().chunk(size)[rank].clone().requires_grad_()
        pair = linear_logprobs(
            hidden, part, targets % vocab, temperature=0.7, vocab_size=vocab, tp_rank=rank, tp_group=group, chunk=4
        )
        grads = _gradients(pair, per_logprob, per_entropy, hidden, part)
        results[name] = [t.detach().numpy() for t in (*pair, *grads)]
    dist.destroy_process_group()
    return results


def test_two_and_three_ranks_equal_one() -> None:
    ranks = run_ranks(3, _on_rank)
    for name, vocab, size, rows in (("tp2", VOCAB, 2, ROWS), ("tp3", 120, 3, ROWS), ("tp3 without rows", 120, 3, 0)):
        hidden, weight, targets, per_logprob, per_entropy = _inputs(rows=rows)
        one = linear_logprobs(hidden, weight, targets % vocab, temperature=0.7, vocab_size=vocab)
        grad_hidden, grad_weight = _gradients(one, per_logprob, per_entropy, hidden, weight)
        results = [[torch.from_numpy(array) for array in rank[name]] for rank in ranks[:size]]
        for logprobs, entropy, *_ in results:
            assert torch.equal(logprobs, results[0][0]) and torch.equal(entropy, results[0][1]), "ranks differ"
            torch.testing.assert_close(logprobs, one[0], **TOLERANCE)
            torch.testing.assert_close(entropy, one[1], **TOLERANCE)
        torch.testing.assert_close(sum(result[2] for result in results), grad_hidden, **TOLERANCE)
        torch.testing.assert_close(torch.cat([result[3] for result in results]), grad_weight, **TOLERANCE)


def _peak_bytes(function: Callable[[], None]) -> int:
    """The most that torch has allocated at a time while `function` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def _forward_and_backward(rows: int, vocab: int, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    hidden, targets = torch.randn(rows, 4, requires_grad=True), torch.zeros(rows, dtype=torch.int64)
    weight = torch.randn(vocab, 4, requires_grad=True)
    logprobs, entropy = function(hidden, weight, targets)
    (logprobs.sum() + entropy.sum()).backward()


def test_peak_memory_does_not_grow_with_rows_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TILE_ELEMENTS", 1 << 16)
    vocab, few, many = 20_000, 64, 512

    def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=vocab, chunk=64)

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(hidden @ weight.t(), -1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    logits = 4 * many * vocab
    peaks = {rows: _peak_bytes(lambda rows=rows: _forward_and_backward(rows, vocab, ours)) for rows in (few, many)}
    assert _peak_bytes(lambda: _forward_and_backward(many, vocab, plain)) > 3 * logits, "what is measured is wrong"
    assert peaks[many] < logits / 20
    assert peaks[many] - peaks[few] < 200 * (many - few), "more than a few numbers per row"


def test_only_the_inputs_and_vectors_are_saved_for_the_backward_pass() -> None:
    hidden, weight, targets, *_ = _inputs()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_logprobs(hidden, weight, targets, temperature=0.7, vocab_size=VOCAB, chunk=4)
    assert saved[0] is hidden and saved[1] is weight
    assert {tuple(tensor.shape) for tensor in saved[2:]} == {(ROWS,)}


def test_without_gradients_there_is_no_graph_and_nothing_is_saved() -> None:
    hidden, weight, targets, *_ = _inputs()

    def pack(tensor: Tensor) -> Tensor:
        raise AssertionError("saved")

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.no_grad():
            pair = linear_logprobs(hidden, weight, targets, temperature=1.0, vocab_size=VOCAB)
        frozen = linear_logprobs(hidden.detach(), weight.detach(), targets, temperature=1.0, vocab_size=VOCAB)
    assert not any(tensor.requires_grad for tensor in (*pair, *frozen))
