"""Launch checks of the model folder, the layout and the data files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapo_megatron.config import ConfigError, load_config
from dapo_megatron.config.validate import check_launch
from dapo_megatron.run_folder import RunLock, prepare_run_folder
from tests.config_files import write_config, write_model_folder, write_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def problems_of(path: Path, *overrides: str) -> list[str]:
    config = load_config(path, overrides)
    with pytest.raises(ConfigError) as caught:
        check_launch(config, str(path))
    return caught.value.problems


def test_a_sound_configuration_passes_without_remarks_but_for_the_missing_sets(path: Path) -> None:
    remarks = check_launch(load_config(path), str(path))
    assert remarks == ["evaluation.sets is empty: no accuracy before and after training"]


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        (
            ["parallel.tensor_model_parallel_size=4", "parallel.nproc_per_node=4"],
            [
                "parallel.tensor_model_parallel_size=4 does not divide the model's 6 attention heads; possible sizes: 1, 2"
            ],
        ),
        (
            ["parallel.tensor_model_parallel_size=3", "parallel.nproc_per_node=3"],
            [
                "parallel.tensor_model_parallel_size=3 neither divides nor is a multiple of the model's 2 key/value heads; possible sizes: 1, 2",
                "parallel.tensor_model_parallel_size=3 does not divide the model's intermediate size 40; possible sizes: 1, 2",
            ],
        ),
        (
            ["rollout.engine.tp_size=5"],
            [
                "rollout.engine.tp_size=5 does not divide the model's 6 attention heads; possible sizes: 1, 2",
                "rollout.engine.tp_size=5 neither divides nor is a multiple of the model's 2 key/value heads; possible sizes: 1, 2",
            ],
        ),
        (
            ["parallel.pipeline_model_parallel_size=3", "parallel.nproc_per_node=3"],
            [
                "parallel.pipeline_model_parallel_size=3 does not divide the model's 4 layers; use one of 1, 2, 4, or split unevenly with megatron.num_layers_in_first_pipeline_stage"
            ],
        ),
        (
            ["data.max_prompt_length=250"],
            [
                "data.max_prompt_length + rollout.max_response_length = 266 is beyond the model's max_position_embeddings=256; lower one of them"
            ],
        ),
    ],
)
def test_an_impossible_layout_names_the_sizes_that_fit(path: Path, overrides: list[str], problems: list[str]) -> None:
    assert problems_of(path, *overrides) == problems


def test_tensor_parallel_may_exceed_the_key_value_heads_by_a_multiple(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    write_model_folder(tmp_path / "wide", num_attention_heads=8, num_key_value_heads=2, intermediate_size=48)
    layout = ["parallel.tensor_model_parallel_size=4", "parallel.nproc_per_node=4"]
    check_launch(load_config(path, [f"model.path={tmp_path / 'wide'}", *layout]), "c")


def test_an_uneven_pipeline_split_is_left_to_megatron(path: Path) -> None:
    overrides = [
        "parallel.pipeline_model_parallel_size=3",
        "parallel.nproc_per_node=3",
        "megatron.num_layers_in_first_pipeline_stage=2",
    ]
    check_launch(load_config(path, overrides), "c")


def test_a_missing_model_folder_is_named(path: Path, tmp_path: Path) -> None:
    assert problems_of(path, "model.path=nowhere")[0].startswith("model.path: no folder ")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_model_file_is_named(path: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "model" / name).unlink()
    problems = problems_of(path)
    assert len(problems) == 1
    assert {"model.safetensors": "*.safetensors"}.get(name, name) in problems[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is no safetensors file"),
        (b"\x08\0\0\0\0\0\0\0not json", "unreadable safetensors header"),
    ],
)
def test_a_placeholder_instead_of_weights_is_found(path: Path, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    assert words in problems_of(path)[0]


def test_cut_weights_are_found_by_their_size(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "model" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    assert f"has {len(whole) - 4} bytes instead of {len(whole)}" in problems_of(path)[0]


def test_a_shard_that_the_index_names_must_be_there(path: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors is missing, but the index names it" in problems_of(path)[0]


def test_a_model_that_cannot_be_reproduced_is_refused_by_field(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    write_model_folder(tmp_path / "other", model_type="mamba")
    assert "model_type 'mamba' is not supported" in problems_of(path, f"model.path={tmp_path / 'other'}")[0]


def test_data_faults_name_key_file_and_row(path: Path, tmp_path: Path) -> None:
    bad = write_rows(tmp_path / "bad.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answr": "2"}])
    (tmp_path / "empty.jsonl").write_text("")
    problems = problems_of(path, f"data.train={bad}", f"evaluation.sets.dev.path={tmp_path / 'empty.jsonl'}")
    assert len(problems) == 2
    assert problems[0].startswith("data.train: ")
    assert "bad.jsonl" in problems[0] and "row 2" in problems[0] and "answer" in problems[0]
    assert problems[1].startswith("evaluation.sets.dev.path: ")
    assert "no rows" in problems[1]


@pytest.mark.parametrize(
    ("warmup", "steps", "remark"),
    [
        (10, 3, "the learning rate only reaches 3e-07 of optim.lr=1e-06"),
        (4, 3, "the learning rate only reaches 7.5e-07 of optim.lr=1e-06"),
        (3, 3, None),
    ],
)
def test_a_run_shorter_than_its_warm_up_is_remarked_with_both_keys(
    path: Path, warmup: int, steps: int, remark: str | None
) -> None:
    overrides = [f"optim.lr_warmup_steps={warmup}", f"trainer.total_steps={steps}", "optim.lr_decay_style=linear"]
    remarks = [r for r in check_launch(load_config(path, overrides), "c") if "warmup" in r]
    if remark is None:
        assert remarks == []
    else:
        assert remarks == [
            f"optim.lr_warmup_steps={warmup} is above trainer.total_steps={steps}: {remark}",
        ]


def test_the_folder_of_an_earlier_run_is_moved_and_a_waiting_trainers_is_kept(path: Path) -> None:
    config = load_config(path)
    folder, moved = prepare_run_folder(config, always_new=True)
    assert moved is None
    assert load_config(folder / "resolved_config.yaml") == config
    (folder / "service.json").write_text("{}")
    (folder / "events.jsonl").write_text("{}\n")
    assert prepare_run_folder(config, always_new=False) == (folder, None)
    assert (folder / "events.jsonl").exists()
    assert not (folder / "service.json").exists()
    (folder / "metrics.jsonl").write_text("{}\n")
    assert prepare_run_folder(config, always_new=False)[1] == folder.with_name("toy.1")
    assert prepare_run_folder(config, always_new=True)[1] == folder.with_name("toy.2")


def test_a_run_folder_that_cannot_be_made_is_a_clear_error(path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = load_config(path, [f"run.dir={tmp_path / 'file'}"])
    for action in (lambda: prepare_run_folder(config, always_new=True), lambda: RunLock(config).__enter__()):
        with pytest.raises(ConfigError, match="cannot write"):
            action()
