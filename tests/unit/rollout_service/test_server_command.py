"""The server's command line and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_service.server_process import (
    argument_list,
    log_tail,
    new_api_key,
    server_arguments,
    server_command,
    server_environment,
    without_proxies,
)
from tests.service_settings import service_settings


def test_cpu_server_gets_the_arguments_that_work_there(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, tmp_path / "model", rollout={"engine": {"max_running_requests": 9}})
    arguments = server_arguments(settings, "cpu", "/somewhere/model", 3, engine_id=2)
    assert arguments == {
        "model_path": "/somewhere/model",
        "weight_version": "3",
        "tp_size": 1,
        "dtype": "float32",
        "max_running_requests": 9,
        "trust_remote_code": False,
        "random_seed": 9,  # run seed 7, engine 2: engines sample differently
        "skip_server_warmup": True,
        "enable_metrics": True,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.1,
        "max_total_tokens": 9 * (32 + 24),
        "sleep_on_idle": True,
    }


def test_cuda_server_keeps_sglangs_own_defaults(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, tmp_path / "model", rollout={"engine": {"tp_size": 4, "dtype": "bfloat16"}})
    arguments = server_arguments(settings, "cuda", "m", 0, engine_id=0)
    assert arguments["tp_size"] == 4
    assert arguments["dtype"] == "bfloat16"
    assert not {"device", "attention_backend", "max_total_tokens"} & set(arguments)


def test_cache_holds_at_least_one_longest_sequence(tmp_path: Path) -> None:
    settings = service_settings(
        tmp_path, tmp_path, data={"max_prompt_length": 2048}, rollout={"max_response_length": 100_000}
    )
    assert server_arguments(settings, "cpu", "m", 0, 0)["max_total_tokens"] == 2048 + 100_000 + 64


def test_verbatim_arguments_win_over_defaults(tmp_path: Path) -> None:
    verbatim = {"mem-fraction-static": 0.5, "sleep_on_idle": False, "log_level": "debug"}
    settings = service_settings(tmp_path, tmp_path / "model", sglang=verbatim)
    arguments = server_arguments(settings, "cpu", "m", 0, 0)
    assert arguments["mem_fraction_static"] == 0.5
    assert arguments["log_level"] == "debug"
    assert "--sleep-on-idle" not in argument_list(arguments)


@pytest.mark.parametrize("name", ["tp_size", "tp-size", "api_key", "weight_version", "model_path"])
def test_argument_owned_by_a_setting_is_refused_with_that_setting(tmp_path: Path, name: str) -> None:
    settings = service_settings(tmp_path, tmp_path / "model", sglang={name: 2})
    with pytest.raises(ValueError, match=f"sglang.{name} is not yours to set"):
        server_arguments(settings, "cpu", "m", 0, 0)


def test_arguments_are_spelled_for_the_command_line() -> None:
    words = argument_list(
        {
            "a_flag": True,
            "off": False,
            "none": None,
            "number": 0.1,
            "words": ["x", "y z"],
            "table": {"k": [1, None]},
            "zero": 0,
        }
    )
    assert words == "--a-flag --number 0.1 --words x".split() + ["y z", "--table", '{"k": [1, null]}', "--zero", "0"]


def test_commands() -> None:
    python, safe_path, script, flag = server_command("py", ["--x"])
    assert (python, safe_path, flag) == ("py", "-P", "--x")
    assert Path(script).name == "sglang_server.py"
    assert Path(script).is_file()


def test_no_proxy_variable_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTPS_PROXY", "All_Proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    environment = server_environment("cpu")
    assert not [name for name in environment if name.lower().endswith("_proxy")]
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert without_proxies({"http_proxy": "x", "PATH": "y"}) == {"PATH": "y"}


def test_log_tail_is_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(5000)))
    assert log_tail(log, 2) == "line 4998\nline 4999"
    assert "no log" in log_tail(tmp_path / "none")


def test_api_keys_are_plain_text_for_argparse_and_yaml() -> None:
    keys = {new_api_key() for _ in range(500)}
    assert len(keys) == 500
    assert all(key.isalnum() and len(key) >= 32 for key in keys)
