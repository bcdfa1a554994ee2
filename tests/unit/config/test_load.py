"""Reading a configuration: numbers, overrides, errors, and the way back to YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.config import ConfigError, RunConfig, load_config, service_settings, to_yaml
from dapo_megatron.config.reference import iter_keys, nearest_key
from tests.config_files import write_config


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def get(config: RunConfig, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("text", "expected"), [("1e-6", 1e-6), ("1E-5", 1e-5), ("1.e-3", 1e-3), (".5", 0.5), ("2", 2.0), ("'1e-6'", 1e-6)]
)
def test_a_number_in_scientific_notation_is_a_number_in_file_and_override_alike(
    tmp_path: Path, text: str, expected: float
) -> None:
    path = write_config(tmp_path)
    in_file = tmp_path / "in_file.yaml"
    in_file.write_text(path.read_text().replace("lr_warmup_steps: 0", f"lr_warmup_steps: 0\n  lr: {text}"))
    assert load_config(in_file).optim.lr == expected
    assert load_config(path, [f"optim.lr={text}"]).optim.lr == expected


def test_numbers_in_verbatim_blocks_arrive_as_floats_from_file_and_override(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    in_file = tmp_path / "in_file.yaml"
    in_file.write_text(
        path.read_text() + "megatron:\n  min_loss_scale: 1e-1\nsglang:\n  schedule_conservativeness: 1e-1\n"
    )
    overridden = load_config(path, ["megatron.min_loss_scale=1e-1", "sglang.schedule_conservativeness=1e-1"])
    for config in (load_config(in_file), overridden):
        assert config.megatron == {"min_loss_scale": 0.1}
        assert config.sglang == {"schedule_conservativeness": 0.1}
        assert isinstance(config.megatron["min_loss_scale"], float)


@pytest.mark.parametrize("text", ["12:30:45", "0123", "on", "yes", "1_000", "2026-01-01", "null_", "x=y"])
def test_text_that_yaml_1_1_would_turn_into_something_else_stays_as_typed(config_path: Path, text: str) -> None:
    assert load_config(config_path, [f"observability.wandb.project={text}"]).observability.wandb.project == text


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("observability.wandb.entity=null", "observability.wandb.entity", None),
        ("data.train=[a.jsonl, b.jsonl]", "data.train", ["a.jsonl", "b.jsonl"]),
        ("data.train=a.jsonl", "data.train", ["a.jsonl"]),
        ("data.template='{prompt} =>'", "data.template", "{prompt} =>"),
        ("trainer.total_steps=07", "trainer.total_steps", 7),
        ("algorithm.clip_ratio_c=null", "algorithm.clip_ratio_c", None),
        ("evaluation.sets={dev: {path: d.jsonl, n: 4}}", "evaluation.sets.dev.n", 4),
        ("data.drop_duplicates=false", "data.drop_duplicates", False),
    ],
)
def test_override_values_are_yaml(
    config_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, key: str, expected: Any
) -> None:
    monkeypatch.chdir(config_path.parent)
    value = get(load_config(config_path, [override]), key)
    if key == "data.train":
        expected = [str(config_path.parent / name) for name in expected]
    assert value == expected


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optim.lr=abc", "optim.lr: 'abc' (str) given"),
        ("optim.lr=.nan", "optim.lr: nan (float) given"),
        ("optim.lr=nan", "optim.lr: 'nan' (str) given"),
        ("optim.lr=.inf", "optim.lr: inf (float) given"),
        ("optim.lr=true", "optim.lr: true (bool) given"),
        ("optim.lr=0", "optim.lr: 0 (int) given"),
        ("trainer.total_steps=2.5", "trainer.total_steps: 2.5 (float) given"),
        ("trainer.total_steps=on", "trainer.total_steps: 'on' (str) given"),
        ("run.name=123", "run.name: 123 (int) given, expected text; put it in quotes"),
        ("model.path=null", "model.path: null given"),
        ("optim=3", "optim: 3 (int) given"),
        ("model.dtype=fp32", "model.dtype: 'fp32' (str) given"),
    ],
)
def test_a_wrong_type_is_refused_with_key_value_and_type(config_path: Path, override: str, named: str) -> None:
    problems = problems_of(config_path, override)
    assert len(problems) == 1
    assert problems[0].startswith(named)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trainer.total_step", "trainer.total_steps"),
        ("optim.learning_rate", None),
        ("lr", "optim.lr"),
        ("trainer.lr", "optim.lr"),
        ("rollout.temperature", "rollout.sampling.temperature"),
        ("rollout.sampling.temp", "rollout.sampling.temperature"),
        ("parallel.tensor_parallel_size", "parallel.tensor_model_parallel_size"),
        ("algorithm.clip_ratio_hi", "algorithm.clip_ratio_high"),
        ("evaluation.sets.dev.greedyy", "evaluation.sets.dev.greedy"),
        ("rollout.filter_group.enable", "rollout.filter_groups"),
        ("max_staleness", "rollout.max_staleness"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(config_path: Path, key: str, nearest: str | None) -> None:
    unknown = [p for p in problems_of(config_path, f"{key}=1") if "unknown key" in p]
    assert len(unknown) == 1
    if nearest is None:
        assert "known here: lr, min_lr" in unknown[0]
    else:
        assert unknown[0].endswith(f"the nearest known key is {nearest}")


def test_every_known_key_is_its_own_nearest() -> None:
    for key in iter_keys():
        assert nearest_key(key.path.replace("<name>", "dev").split(".")) == key.path.replace("<name>", "dev")


def test_all_problems_come_in_one_error(config_path: Path) -> None:
    problems = problems_of(config_path, "optim.lr=abc", "trainer.totl_steps=1", "trainer.total_steps=true")
    assert sorted(p.split(":")[0] for p in problems) == ["optim.lr", "trainer.total_steps", "trainer.totl_steps"]


def test_a_missing_required_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {name: x}\nmodel: {path: m}\ntrainer: {total_steps: 1}\ndata: {}\n")
    assert problems_of(path) == [
        "data.train: required, but not given (JSONL or parquet files (or one hub data set name) with the training prompts)"
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("run: {name: x\n", "line 2, column 1: not valid YAML"),
        ("run: {name: x}\nrun: {name: y}\n", "line 2, column 1: not valid YAML: 'run' stands twice"),
        ("- a\n", "the file holds no `key: value` block"),
        ("", "the file holds no `key: value` block"),
        ("run: {name: '${model.pth}'}\n", "model.pth"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    problems = problems_of(path)
    assert len(problems) == 1
    assert named in problems[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "nowhere.yaml")[0].startswith("no such file")


@pytest.mark.parametrize("override", ["trainer.total_steps", "=3", "a b=3", "--x=1"])
def test_an_override_of_another_form_is_refused(config_path: Path, override: str) -> None:
    assert problems_of(config_path, override) == [f"override {override!r} is not of the form a.b.c=value"]


def test_the_resolved_yaml_reads_back_to_an_equal_configuration(config_path: Path, tmp_path: Path) -> None:
    overrides = [
        "optim.lr=1e-6",
        "observability.wandb.project='1e-6'",
        "observability.wandb.entity='on'",
        r"data.template='a \${b} {prompt} $Answer: x # y'",
        "sglang.schedule_conservativeness=1e-1",
        "algorithm.clip_ratio_c=null",
        "evaluation.sets={dev: {path: d.jsonl}}",
    ]
    config = load_config(config_path, overrides)
    assert config.data.template == "a ${b} {prompt} $Answer: x # y"
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config


def test_interpolation_refers_to_other_given_keys(config_path: Path) -> None:
    config = load_config(config_path, ["run.seed=5", "observability.wandb.project=p-${run.name}-${run.seed}"])
    assert config.observability.wandb.project == "p-toy-5"


def test_paths_come_back_absolute_and_hub_names_stay(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config_path.parent)
    config = load_config(
        config_path,
        [
            "run.dir=out",
            "model.path=./model",
            "data.train=[train.jsonl, org/set]",
            "evaluation.sets.dev.path=d.parquet",
        ],
    )
    here = str(config_path.parent)
    assert config.run.dir == f"{here}/out"
    assert config.model.path == f"{here}/model"
    assert config.data.train == [f"{here}/train.jsonl", "org/set"]
    assert config.evaluation.sets["dev"].path == f"{here}/d.parquet"


def test_service_settings_carry_the_sections(config_path: Path, tmp_path: Path) -> None:
    config = load_config(config_path, ["sglang.sleep_on_idle=true"])
    settings = service_settings(config, tmp_path)
    assert settings.run_dir == str(tmp_path)
    assert settings.rollout == config.rollout
    assert settings.model_dtype == "float32"
    assert settings.sglang == {"sleep_on_idle": True}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rollout.sampling.temperature=0", "rollout.sampling.temperature=0.0: training needs a temperature above 0"),
        ("rollout.sampling.temperature=-0.1", "rollout.sampling.temperature: -0.1 (float) given"),
        ("rollout.sampling.top_k=0", "rollout.sampling.top_k=0: use -1"),
        ("rollout.sampling.top_p=0.7", "rollout.sampling.top_p/top_k/min_p truncate the distribution"),
        ("rollout.sampling.top_k=20", "rollout.sampling.top_p/top_k/min_p truncate the distribution"),
    ],
)
def test_training_sampling_that_the_trainer_cannot_mirror_is_refused(
    config_path: Path, override: str, named: str
) -> None:
    problems = problems_of(config_path, override)
    assert len(problems) == 1
    assert problems[0].startswith(named)


def test_evaluation_may_be_greedy_and_truncated(config_path: Path) -> None:
    sampling = "evaluation.sets={dev: {path: d.jsonl, sampling: {temperature: 0, top_p: 0.7, top_k: 20}}}"
    assert load_config(config_path, [sampling]).evaluation.sets["dev"].sampling.temperature == 0


@pytest.mark.parametrize(
    ("block", "refused"),
    [
        ("{enable: true, len: 0}", "rollout.overlong_buffer.len=0 with overlong_buffer.enable=true"),
        ("{enable: false, len: 0}", None),
        ("{enable: false}", None),
        ("{enable: false, len: 999}", None),
        ("{enable: true, len: 16}", None),
        ("{enable: true, len: 17}", "rollout.overlong_buffer.len=17 is larger than max_response_length=16"),
        ("{enable: true, len: 8, penalty_factor: 0}", None),
    ],
)
def test_overlong_buffer_edges(config_path: Path, block: str, refused: str | None) -> None:
    override = f"rollout.overlong_buffer={block}"
    if refused is None:
        load_config(config_path, [override])
    else:
        problems = problems_of(config_path, override)
        assert len(problems) == 1
        assert problems[0].startswith(refused)
