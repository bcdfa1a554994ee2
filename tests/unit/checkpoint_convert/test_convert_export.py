"""Writing HF folders: what transformers loads back, what goes along, and that nothing half-written is ever seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_convert.architecture import read_architecture
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.export import DEFAULT_SHARD_BYTES, ExportFolder, ShardWriter, plan_shards, tensor_plans
from checkpoint_convert.hf import HFReader
from checkpoint_convert.loading import check_checkpoint, load_shard
from checkpoint_convert.mapping import ParamMapping, build_mapping
from tests.toy_models import load_model
from tests.unit.checkpoint_convert.conftest import VARIANTS

ModelFolder = Callable[[str], Path]


def stream(folder: Path, mapping: dict[str, ParamMapping], tp: int = 2) -> Iterator[tuple[str, Tensor]]:
    """What a trainer streams: each parameter's shards gathered and merged, in a buffer that is reused."""
    with HFReader(folder) as reader:
        for name, entry in mapping.items():
            if not entry.tied_copy:
                shards = [load_shard(reader, mapping, name, r, tp, etp_rank=r, etp_size=tp) for r in range(tp)]
                for hf_name, tensor in entry.merge(shards):
                    yield hf_name, tensor
                    tensor.fill_(float("nan"))


def export(
    mapping: dict[str, ParamMapping],
    tensors: Iterable[tuple[str, Tensor]],
    out_dir: Path,
    source: Path,
    dtype: torch.dtype,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """What one process does that writes a whole model."""
    parts = plan_shards([tensor_plans(mapping, mapping, dtype)], max_shard_bytes)
    folder = ExportFolder(out_dir, source, dtype)
    folder.create()
    try:
        with ShardWriter(folder.incomplete, parts[0]) as writer:
            for name, tensor in tensors:
                writer.add(name, tensor)
            writer.finish()
        folder.publish(parts)
    except Exception:
        folder.discard()
        raise
    return out_dir


def mapping_of(folder: Path) -> dict[str, ParamMapping]:
    return build_mapping(read_architecture(folder), "local")


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_model_has_the_same_logits_in_transformers(
    model_folder: ModelFolder, tmp_path: Path, variant: str
) -> None:
    source = model_folder(variant)
    mapping = mapping_of(source)
    out = export(mapping, stream(source, mapping, 4), tmp_path / "out", source, torch.float32)
    ids = torch.tensor([[5, 70, 33, 12, 12, 8, 41]])
    with torch.no_grad():
        want, got = load_model(source)(ids).logits, load_model(out)(ids).logits
    assert torch.equal(got, want)
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}


def test_a_sharded_export_loads_and_its_index_is_complete(model_folder: ModelFolder, tmp_path: Path) -> None:
    source = model_folder("qwen2")
    mapping = mapping_of(source)
    export(mapping, stream(source, mapping), tmp_path / "out", source, torch.float32, max_shard_bytes=60_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    with HFReader(tmp_path / "out") as reader, HFReader(source) as original:
        check_checkpoint(reader, mapping)
        assert all(torch.equal(reader.tensor(name), original.tensor(name)) for name in original.names)
        total = sum(reader.tensor(name).nbytes for name in reader.names)
    assert index["metadata"]["total_size"] == total
    ids = torch.tensor([[3, 9, 27]])
    assert torch.equal(load_model(tmp_path / "out")(ids).logits, load_model(source)(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_config_names_the_dtype_of_the_tensors(
    model_folder: ModelFolder, tmp_path: Path, dtype: torch.dtype, key: str | None
) -> None:
    from transformers import AutoModelForCausalLM

    source = Path(shutil.copytree(model_folder("llama"), tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype")
    if key:
        config[key] = "float16"
    (source / "config.json").write_text(json.dumps(config))
    mapping = mapping_of(source)
    export(mapping, stream(source, mapping), tmp_path / "out", source, dtype)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    assert written["dtype"] == name
    assert written.get("torch_dtype", name) == name
    assert ("torch_dtype" in written) == (key == "torch_dtype")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    original = load_file(source / "model.safetensors")
    assert all(torch.equal(tensors[name], original[name].to(dtype)) for name in original)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


def test_the_selection_bias_stays_float32_and_prediction_layers_are_gone(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    source = model_folder("deepseek_v3")
    assert json.loads((source / "config.json").read_text())["num_nextn_predict_layers"] == 1
    mapping = mapping_of(source)
    out = export(mapping, stream(source, mapping), tmp_path / "out", source, torch.bfloat16)
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    original, written = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    bias = {name for name in original if name.endswith("e_score_correction_bias")}
    assert len(bias) == 2
    assert {name for name, tensor in written.items() if tensor.dtype == torch.float32} == bias
    assert all(torch.equal(written[name], original[name]) for name in bias)
    # transformers keeps it in float32, too.
    model = load_model(out)
    assert all(torch.equal(model.state_dict()[name], original[name]) for name in bias)


def test_tokenizer_template_and_generation_files_go_along(model_folder: ModelFolder, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    source = Path(shutil.copytree(model_folder("qwen3-tied"), tmp_path / "source"))
    template = "{% for message in messages %}<bos>{{ message['content'] }}{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    (source / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 1]}')
    (source / "added_tokens.json").write_text("{}")
    (source / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("x")
    (source / "LICENSE").write_text("Apache-2.0")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    (source / "optimizer.pt").write_bytes(b"state")
    (source / "linked.json").write_text('{"eos_token": "<eos>"}')
    (source / "special_tokens_map.json").unlink()
    (source / "special_tokens_map.json").symlink_to(source / "linked.json")  # as in the hub's cache

    mapping = mapping_of(source)
    out = export(mapping, stream(source, mapping), tmp_path / "out", source, torch.bfloat16)
    for name in ("chat_template.jinja", "generation_config.json", "added_tokens.json", "tokenizer.json", "LICENSE"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "additional_chat_templates" / "tool.jinja").read_text() == "x"
    assert not (out / "special_tokens_map.json").is_symlink()
    assert not (out / "pytorch_model.bin").exists()
    assert not (out / "optimizer.pt").exists()
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 1]
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "sort 52913"}]
    assert after.apply_chat_template(chat, tokenize=True, return_dict=False) == before.apply_chat_template(
        chat, tokenize=True, return_dict=False
    )
    # Engines may run as another user.
    assert {path.stat().st_mode & 0o777 for path in out.iterdir() if path.is_file()} == {
        (out / "config.json").stat().st_mode & 0o777
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[:-1], r"lm_head\.weight was not given \(1 tensors are missing\)"),
        (lambda pairs: [*pairs, pairs[0]], "more tensors were given than planned"),
        (lambda pairs: [pairs[0], *pairs], r"embed_tokens\.weight was given, but model\.layers\.0\.\S+ is next"),
        (lambda pairs: [("score.weight", torch.zeros(1)), *pairs], r"score\.weight was given, but \S+ is next"),
        (lambda pairs: [(pairs[0][0], torch.zeros(80, 48)), *pairs[1:]], r"embed_tokens\.weight has shape \(80, 48\)"),
    ],
)
def test_an_incomplete_or_wrong_stream_publishes_nothing(
    model_folder: ModelFolder, tmp_path: Path, change: Callable[[list[tuple[str, Tensor]]], list], message: str
) -> None:
    source = model_folder("llama")
    mapping = mapping_of(source)
    pairs = [(name, tensor.clone()) for name, tensor in stream(source, mapping)]
    with pytest.raises(ValueError, match=message):
        export(mapping, change(pairs), tmp_path / "out", source, torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_export_stays_whole_until_the_new_one_is_complete(model_folder: ModelFolder, tmp_path: Path) -> None:
    source = model_folder("llama-tied")
    mapping = mapping_of(source)
    out = export(mapping, stream(source, mapping), tmp_path / "out", source, torch.float32)
    before = load_file(out / "model.safetensors")

    def dies() -> Iterator[tuple[str, Tensor]]:
        yield from list(stream(source, mapping))[:5]
        raise OSError("the trainer died")

    with pytest.raises(OSError, match="the trainer died"):
        export(mapping, dies(), out, source, torch.bfloat16)
    after = load_file(out / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)

    export(mapping, stream(source, mapping), out, source, torch.bfloat16, max_shard_bytes=20_000)
    assert not (out / "model.safetensors").exists()
    with HFReader(out) as reader:
        check_checkpoint(reader, mapping)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_a_killed_export_are_cleared(model_folder: ModelFolder, tmp_path: Path) -> None:
    source = model_folder("llama-tied")
    mapping = mapping_of(source)
    (tmp_path / ".out.incomplete").mkdir()
    (tmp_path / ".out.incomplete" / "part-00007.safetensors").write_bytes(b"half")
    out = export(mapping, stream(source, mapping), tmp_path / "out", source, torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not list(out.glob("part-*"))


def test_places_that_must_not_be_overwritten_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    source = Path(shutil.copytree(model_folder("llama"), tmp_path / "models" / "source"))
    for place in (source, source.parent):
        with pytest.raises(CheckpointError, match="overwrite the model that it came from"):
            ExportFolder(place, source, torch.float32)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a model folder"):
        ExportFolder(tmp_path / "notes", source, torch.float32)
    with pytest.raises(CheckpointError, match=r"cannot export as torch\.float64"):
        ExportFolder(tmp_path / "out", source, torch.float64)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        ExportFolder(tmp_path / "out", tmp_path / "notes", torch.float32)
