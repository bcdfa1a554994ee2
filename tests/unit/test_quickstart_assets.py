"""The files under assets/quickstart are what the quickstart and its configuration take them to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from dapo_megatron.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "assets" / "quickstart"
MODEL = ASSETS / "model"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ASSETS / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model_config() -> dict:
    return json.loads((MODEL / "config.json").read_text())


def test_everything_is_small_and_readable() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "train.jsonl",
        "heldout.jsonl",
    }
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert sum(path.stat().st_size for path in files if path.suffix == ".jsonl") < 300_000


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_answers_are_the_sorted_digits(name: str) -> None:
    for row in rows(name):
        word, digits = row["prompt"].split(" ")
        assert set(row) == {"prompt", "answer"} and word == "sort"
        assert set(digits) <= set("123456789") and row["answer"] == "".join(sorted(digits))


def test_prompts_are_distinct_and_held_out_ones_are_not_trained_on() -> None:
    train, heldout = ([row["prompt"] for row in rows(name)] for name in ("train.jsonl", "heldout.jsonl"))
    assert len(set(train)) == len(train) == 4000 and len(set(heldout)) == len(heldout) == 384
    assert not set(train) & set(heldout)


def test_special_tokens_are_distinct_and_the_vocabularies_agree(tokenizer, model_config) -> None:
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert len(set(special)) == 4 and None not in special
    assert len(tokenizer) == model_config["vocab_size"] and model_config["vocab_size"] % 2 == 0
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert model_config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert tokenizer.chat_template is None


def test_every_prompt_and_answer_survives_the_tokenizer(tokenizer) -> None:
    for row in rows("heldout.jsonl"):
        for text in (row["prompt"], f"Answer: {row['answer']}"):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == 6  # one word, five digits; nothing added in front or behind
            assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
    text = "Spelled out: Answer:12, sorted"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    eos = tokenizer("Answer: 1" + tokenizer.eos_token)["input_ids"]
    assert eos[-1] == tokenizer.eos_token_id and tokenizer.decode(eos, skip_special_tokens=True) == "Answer: 1"


def test_weights_are_float32_not_square_and_split_over_two_ranks(model_config) -> None:
    assert model_config["model_type"] == "qwen3" and model_config["dtype"] == "float32"
    with safe_open(MODEL / "model.safetensors", framework="np") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}
        dtypes = {weights.get_slice(name).get_dtype() for name in shapes}
    assert dtypes == {"F32"}
    assert all(len(set(shape)) == len(shape) for shape in shapes.values())
    assert ("lm_head.weight" in shapes) != model_config["tie_word_embeddings"]
    assert shapes["model.embed_tokens.weight"] == [model_config["vocab_size"], model_config["hidden_size"]]
    heads, kv_heads = model_config["num_attention_heads"], model_config["num_key_value_heads"]
    assert heads != kv_heads and heads % 2 == kv_heads % 2 == model_config["intermediate_size"] % 2 == 0


def test_the_quickstart_configuration_fits_the_files(tokenizer, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(ROOT / "configs" / "quickstart.yaml", [])
    longest = max(
        len(tokenizer(row["prompt"])["input_ids"]) for name in ("train.jsonl", "heldout.jsonl") for row in rows(name)
    )
    assert longest <= config.data.max_prompt_length
    assert config.run.name == "quickstart" and config.parallel.tensor_model_parallel_size == 2
    buffer = config.rollout.overlong_buffer
    # `Answer: `, five digits and the end are never punished.
    assert buffer.enable and 7 <= config.rollout.max_response_length - buffer.len
    # No prompt is seen twice, even if as many groups again are filtered out.
    assert config.trainer.total_steps * config.rollout.prompts_per_step * 2 <= len(rows("train.jsonl"))
