"""Make the quickstart's model and task, `assets/quickstart/`, from nothing but a seed.

    python scripts/make_quickstart_model.py

The task: `sort 52913` wants the digits in order, `Answer: 12359`. Digits are 1 to 9, so that reading the answer as a
number (as math-verify does) never loses a leading zero. A rule can check it, and nearly right is wrong: what
reinforcement learning is for.

The model: Qwen3's architecture, 2 layers, 0.4 million weights, a tokenizer of single characters and two words. It is
warmed up by plain supervised learning on answers in which about every fifth digit is wrong, just until it *sometimes*
sorts (sampled accuracy between 0.2 and 0.3 on held-out prompts). Such a model knows more than its samples show. DAPO
learns from prompts that some samples solve and others miss; from a model that solves nothing it could learn nothing.
The rest is left to the quickstart.

Written: `model/` (a Hugging Face folder, float32), `train.jsonl`, `heldout.jsonl` (no prompt in common).
One thread takes about 20 seconds. The same seed and library versions on the same kind of CPU give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?!+-*/="
WORDS = ["sort ", "Answer: "]  # one token each: what never varies need not be generated letter by letter
CONTEXT = 128  # longest sequence that the model accepts, prompt and response together

# No matrix is square (hidden 144, heads x head_dim 128, ffn 320, vocabulary 80): a missing transpose cannot hide.
# TP 2 divides heads, KV heads, ffn and vocabulary.
ARCHITECTURE = {
    "hidden_size": 144,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
}

TARGET_ACCURACY = (0.22, 0.28)


def build_tokenizer():
    """A tokenizer with one token per character and for each of `WORDS`; pad, bos, eos and unk are distinct."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *WORDS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*WORDS, r"[\s\S]"])), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def save_tokenizer(folder: Path) -> None:
    """Write a fresh tokenizer (a used one remembers its last padding), by the class name that all versions know."""
    build_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "backend"}
    path.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


def make_rows(rng: random.Random, count: int, digits: tuple[int, int]) -> list[dict[str, str]]:
    """`count` distinct problems with `digits[0]` to `digits[1]` digits, in random order."""
    problems: dict[str, None] = {}
    while len(problems) < count:
        problems["".join(rng.choices("123456789", k=rng.randint(*digits)))] = None
    return [{"prompt": f"sort {p}", "answer": "".join(sorted(p))} for p in problems]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_mistakes(rng: random.Random, rows: list[dict[str, str]], share: float) -> list[dict[str, str]]:
    """The rows with each digit of an answer replaced by a random one with probability `share`."""
    return [
        {**row, "answer": "".join(rng.choice("123456789") if rng.random() < share else c for c in row["answer"])}
        for row in rows
    ]


def encode(tokenizer, rows: list[dict[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids `[n, L]` and labels (-100 where not trained: prompt and padding)."""
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    responses = [[*tokenizer(f"Answer: {row['answer']}")["input_ids"], tokenizer.eos_token_id] for row in rows]
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for i, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        labels[i, len(p) : len(p) + len(r)] = torch.tensor(r)
    return ids, labels


@torch.no_grad()
def accuracy(model, tokenizer, rows: list[dict[str, str]], sampled: bool) -> float:
    """Share of rows answered right, sampling at temperature 1 or greedily."""
    model.eval()
    side = tokenizer.padding_side
    tokenizer.padding_side = "left"
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, return_token_type_ids=False)
    tokenizer.padding_side = side
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
    out = model.generate(**batch, **sampling, max_new_tokens=24)
    model.train()
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == f"Answer: {row['answer']}" for text, row in zip(texts, rows, strict=True)) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "assets" / "quickstart")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--train-rows", type=int, default=4000)
    parser.add_argument("--heldout-rows", type=int, default=384)
    parser.add_argument("--digits", type=int, nargs=2, default=(5, 5), metavar=("FEWEST", "MOST"))
    parser.add_argument("--mistakes", type=float, default=0.22, help="share of wrong digits in the warm-up's answers")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-steps", type=int, default=1500)
    args = parser.parse_args()
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)  # also fixes the order of float additions
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = build_tokenizer()
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), dtype="float32", **ARCHITECTURE, **ids))

    rows = make_rows(rng, args.train_rows + args.heldout_rows, tuple(args.digits))
    heldout, train = rows[: args.heldout_rows], rows[args.heldout_rows :]

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    low, high = TARGET_ACCURACY
    for step in range(1, args.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 10)
        input_ids, labels = encode(tokenizer, with_mistakes(rng, rng.sample(train, args.batch), args.mistakes))
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            estimate = accuracy(model, tokenizer, heldout, sampled=True)
            print(f"step {step:4d}  loss {loss.item():.4f}  sampled accuracy {estimate:.3f}", flush=True)
            if estimate >= low:
                # One pass over the held-out rows is off by +-0.02; four tell the two sides of the band apart.
                estimate = sum(accuracy(model, tokenizer, heldout, sampled=True) for _ in range(4)) / 4
                if estimate >= low:
                    break
    else:
        raise SystemExit(f"accuracy did not reach {low} in {args.max_steps} steps; raise --max-steps or --lr")
    if estimate >= high:
        raise SystemExit(f"accuracy {estimate:.3f} jumped over the band {low} to {high}; lower --lr or change --seed")

    folder = args.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(**ids)  # nothing else: how to sample is for the caller to say
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner only
    save_tokenizer(folder)
    write_rows(args.out / "train.jsonl", train)
    write_rows(args.out / "heldout.jsonl", heldout)
    greedy = accuracy(model, tokenizer, heldout, sampled=False)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} weights, sampled accuracy {estimate:.3f}, greedy {greedy:.3f}, written to {args.out}"
    )


if __name__ == "__main__":
    main()
