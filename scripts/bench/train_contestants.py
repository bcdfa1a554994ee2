"""The ways to do a training step that `train_vs_trl.py` compares: ours, plain transformers, TRL."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CLIP_LOW, CLIP_HIGH, CLIP_GRAD = 0.2, 0.28, 1.0
LR, WEIGHT_DECAY, BETAS, EPS = 1e-6, 0.1, (0.9, 0.95), 1e-8

# A small Llama: 17M weights, of which the tied embedding has 10M.
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_hidden_layers": 6,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Settings:
    """The command line."""

    samples: int
    group_size: int
    max_response: int
    micro_batch: int
    max_tokens: int


@dataclass(frozen=True)
class Batch:
    """Groups of `group_size` samples with one prompt each; samples are group-major.

    Attributes:
        prompts: int32 token ids of each group.
        responses: int32 token ids of each sample.
        rewards: float32 `[N]`, +-1, mixed within each group.
        old_logprobs: float32 log-probs of each sample's response tokens.
    """

    group_size: int
    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    rewards: np.ndarray
    old_logprobs: list[np.ndarray]

    @property
    def samples(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.prompts[i // self.group_size], response) for i, response in enumerate(self.responses)]

    @property
    def tokens(self) -> int:
        return sum(len(prompt) + len(response) for prompt, response in self.samples)

    @property
    def response_tokens(self) -> int:
        return sum(map(len, self.responses))

    @property
    def advantages(self) -> np.ndarray:
        """float32 `[N]`: (R - mean) / (sample std + 1e-6) within each group."""
        rewards = self.rewards.astype(np.float64).reshape(-1, self.group_size)
        scaled = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
        return scaled.reshape(-1).astype(np.float32)


def make_batch(vocab: int, samples: int, group_size: int, max_response: int, seed: int) -> Batch:
    """Prompts of 30 to 80 tokens; log-normal response lengths from 10 to `max_response`, median a quarter of that."""
    rng = np.random.default_rng(seed)
    groups = samples // group_size
    lengths = np.clip(rng.lognormal(np.log(max_response / 4), 0.8, samples), 10, max_response).astype(int)
    rewards = rng.choice([-1.0, 1.0], (groups, group_size))
    rewards[:, 0], rewards[:, 1] = -1.0, 1.0
    return Batch(
        group_size=group_size,
        prompts=[rng.integers(4, vocab, rng.integers(30, 81)).astype(np.int32) for _ in range(groups)],
        responses=[rng.integers(4, vocab, n).astype(np.int32) for n in lengths],
        rewards=rewards.reshape(-1).astype(np.float32),
        old_logprobs=[np.zeros(n, np.float32) for n in lengths],
    )


def make_model(folder: Path) -> None:
    """Write a random model; weights large enough that the policy is far from uniform."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.06, dtype=torch.float32))
    model.save_pretrained(folder)


class Contestant(Protocol):
    """One way to do the step; tensors stay in its process."""

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs of each sample's response tokens under the present weights."""

    def update(self, batch: Batch) -> tuple[float, float]:
        """One optimizer update; returns the loss and the gradient norm before clipping."""


class Ours:
    """The actor as the trainer drives it."""

    def __init__(self, model_dir: str, settings: Settings) -> None:
        from dapo_megatron.platform import current_platform

        platform = current_platform()

        from checkpoint_convert.architecture import read_architecture
        from dapo_megatron.actor.actor import Actor
        from dapo_megatron.actor.process_groups import initialize
        from dapo_megatron.config.sections import RunConfig

        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        groups = settings.samples // settings.group_size
        self.config = RunConfig.model_validate(
            {
                "run": {"name": "train_vs_trl"},
                "model": {"path": model_dir, "dtype": "float32"},
                "data": {"train": ["unused"], "max_prompt_length": 80},
                "rollout": {
                    "prompts_per_step": groups,
                    "n_samples_per_prompt": settings.group_size,
                    "max_response_length": settings.max_response,
                },
                "algorithm": {"clip_ratio_low": CLIP_LOW, "clip_ratio_high": CLIP_HIGH, "clip_ratio_c": None},
                "parallel": {"nproc_per_node": 1},
                "optim": {
                    "lr": LR,
                    "lr_warmup_steps": 0,
                    "weight_decay": WEIGHT_DECAY,
                    "adam_beta1": BETAS[0],
                    "adam_beta2": BETAS[1],
                    "adam_eps": EPS,
                    "clip_grad": CLIP_GRAD,
                },
                "trainer": {
                    "total_steps": 1000,
                    "mini_batch_prompts": groups,
                    "max_tokens_per_gpu": settings.max_tokens,
                },
            }
        )
        layout = initialize(self.config.parallel, platform, seed=1)
        self.actor = Actor(self.config, read_architecture(model_dir), layout, platform)
        self.actor.load_hf(model_dir)

    def _assemble(self, batch: Batch) -> Any:
        from dapo_megatron.step_batch import assemble
        from rollout_service.sample import GroupMeta, Ticket

        metas, packed = [], []
        for order, prompt in enumerate(batch.prompts):
            part = slice(order * batch.group_size, (order + 1) * batch.group_size)
            lengths = np.array([len(r) for r in batch.responses[part]], np.int32)
            metas.append(
                GroupMeta(
                    order=order,
                    prompt_id=f"p{order}",
                    epoch=0,
                    prompt_length=len(prompt),
                    response_lengths=lengths,
                    rewards=batch.rewards[part],
                    acc=(batch.rewards[part] > 0).astype(np.float32),
                    truncated=np.zeros(len(lengths), bool),
                    oldest_version=0,
                    newest_version=0,
                    admitted_version=0,
                )
            )
            packed.append(
                {
                    "prompt_ids": prompt,
                    "response_ids": np.concatenate(batch.responses[part]),
                    "behaviour_logprobs": np.concatenate(batch.old_logprobs[part]),
                    "token_versions": np.zeros(int(lengths.sum()), np.int32),
                    "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                }
            )
        ticket = Ticket(step=1, groups=metas, refs=list(range(len(metas))), stats={})
        return assemble(ticket, lambda refs: [packed[r] for r in refs], self.config, dp_rank=0, dp_size=1)

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        (micro_batches,) = self._assemble(batch).mini_batches
        outputs = self.actor.logprobs([micro.packed for micro in micro_batches])
        found: dict[int, np.ndarray] = {}
        for micro, (logprobs, _) in zip(micro_batches, outputs, strict=True):
            for position, sample in enumerate(micro.samples):
                found[sample] = logprobs[micro.packed.sample_index == position].numpy()
        return [found[i] for i in range(len(batch.responses))]

    def update(self, batch: Batch) -> tuple[float, float]:
        (micro_batches,) = self._assemble(batch).mini_batches
        # Old and behaviour log-probs are the same here, so that no importance weight changes the loss.
        result = self.actor.update([micro.with_old_logprobs(micro.behaviour_logprobs) for micro in micro_batches])
        return result.metrics["loss"], result.step.grad_norm


class Plain:
    """transformers with padded micro-batches and torch's optimizer, written as one would at first."""

    def __init__(self, model_dir: str, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.micro_batch = settings.micro_batch
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def _padded_logprobs(self, samples: list[tuple[np.ndarray, np.ndarray]]) -> Any:
        """Log-probs `[b, L - 1]` of every next token of right-padded samples."""
        import torch

        sequences = [torch.from_numpy(np.concatenate(sample)).long() for sample in samples]
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        logits = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def _micro_batches(self, batch: Batch) -> list[slice]:
        return [slice(i, i + self.micro_batch) for i in range(0, len(batch.responses), self.micro_batch)]

    def logprobs(self, batch: Batch) -> list[np.ndarray]:
        import torch

        found = []
        for part in self._micro_batches(batch):
            samples = batch.samples[part]
            with torch.no_grad():
                logprobs = self._padded_logprobs(samples)
            for row, (prompt, response) in zip(logprobs, samples, strict=True):
                found.append(row[len(prompt) - 1 : len(prompt) + len(response) - 1].numpy().copy())
        return found

    def update(self, batch: Batch) -> tuple[float, float]:
        import torch

        total, advantages = 0.0, torch.from_numpy(batch.advantages)
        for part in self._micro_batches(batch):
            samples = batch.samples[part]
            logprobs = self._padded_logprobs(samples)
            old, mask = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
            for row, (prompt, response) in enumerate(samples):
                columns = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
                old[row, columns] = torch.from_numpy(batch.old_logprobs[part][row])
                mask[row, columns] = 1.0
            ratio = torch.exp((logprobs - old) * mask)
            advantage = advantages[part, None]
            token_loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
            loss = (token_loss * mask).sum() / batch.response_tokens
            loss.backward()
            total += loss.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, float(grad_norm)


def serve_trl(model_dir: str, settings: Settings, connection: Connection, *, response_rows: bool) -> None:
    """TRL's trainer asks for a batch of completions in its own loop: there the commands are waited for and answered."""
    import torch
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import utils as trl_utils
    from trl.trainer.utils import pad

    transformers.logging.set_verbosity_error()
    disable_progress_bar()

    if response_rows:
        # The output layer asks this whether to pick the scored rows; the kernel itself asks its own module.
        trl_utils._use_triton = lambda device: True

    class Stop(Exception):
        pass

    class GivenCompletions(GRPOTrainer):
        def _padded(self, batch: Batch) -> dict[str, Any]:
            """What `_generate_and_score_completions` returns: prompts padded left, completions right."""

            def tensors(arrays: list[np.ndarray], side: str) -> tuple[torch.Tensor, torch.Tensor]:
                ids = [torch.from_numpy(array).long() for array in arrays]
                return pad(ids, 0, side), pad([torch.ones_like(i) for i in ids], 0, side)

            prompt_ids, prompt_mask = tensors([prompt for prompt, _ in batch.samples], "left")
            completion_ids, completion_mask = tensors(batch.responses, "right")
            return {
                "prompt_ids": prompt_ids,
                "prompt_mask": prompt_mask,
                "completion_ids": completion_ids,
                "completion_mask": completion_mask,
                "advantages": torch.from_numpy(batch.advantages),
                "num_items_in_batch": completion_mask.sum(),
                "old_per_token_logps": pad([torch.from_numpy(old) for old in batch.old_logprobs], 0.0),
            }

        @torch.no_grad()
        def _given_logprobs(self, batch: Batch) -> list[np.ndarray]:
            inputs = self._padded(batch)
            logprobs, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                inputs["completion_ids"].shape[1],
                batch_size=self.args.per_device_train_batch_size,
            )
            return [row[: len(r)].numpy().copy() for row, r in zip(logprobs, batch.responses, strict=True)]

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            while True:
                command, batch = connection.recv()
                if command == "stop":
                    raise Stop
                self.began = time.perf_counter()
                if command == "update":
                    self.loss = 0.0
                    return self._padded(batch)
                logprobs = self._given_logprobs(batch)
                connection.send((time.perf_counter() - self.began, logprobs))

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.loss += loss.item()
            return loss

        def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
            self.grad_norm = super()._clip_grad_norm(model)
            return self.grad_norm

    class Answer(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds = time.perf_counter() - trainer.began
            connection.send((seconds, (trainer.loss, float(trainer.grad_norm))))

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, "<pad>")))
    tokenizer.pad_token = tokenizer.eos_token = "<pad>"
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = GivenCompletions(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=output_dir,
                per_device_train_batch_size=settings.micro_batch,
                gradient_accumulation_steps=settings.samples // settings.micro_batch,
                num_generations=settings.group_size,
                max_completion_length=settings.max_response,
                max_steps=100_000,
                loss_type="dapo",
                epsilon=CLIP_LOW,
                epsilon_high=CLIP_HIGH,
                learning_rate=LR,
                lr_scheduler_type="constant",
                weight_decay=WEIGHT_DECAY,
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                adam_epsilon=EPS,
                max_grad_norm=CLIP_GRAD,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_steps=1_000_000,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["unused"] * settings.samples}),
            processing_class=tokenizer,
            callbacks=[Answer()],
        )
        connection.send((0.0, None))
        try:
            trainer.train()
        except Stop:
            connection.send((0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
