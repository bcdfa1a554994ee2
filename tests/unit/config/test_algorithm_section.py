"""The `algorithm` block: names, import paths, combinations that cannot work, and third-party contracts at launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_megatron.config import ConfigError, load_config
from dapo_megatron.config.algorithm_section import AlgorithmSection
from dapo_megatron.config.validate import check_launch
from tests.config_files import write_config

PLUGIN = """
import torch
from dapo_megatron.algorithm import PolicyLossOutput

def halved(rewards, group_ids, *, eps, std):
    return rewards / 2

def short(rewards, group_ids, *, eps, std):
    return rewards[:1]

def moody(rewards, group_ids, *, eps, std):
    return torch.rand(len(rewards), dtype=rewards.dtype)

def sound(logprobs, old_logprobs, advantages, mask, **rest):
    return PolicyLossOutput(torch.where(mask, -advantages * torch.where(mask, logprobs, 0.0), 0.0))

def leaking(logprobs, old_logprobs, advantages, mask, **rest):
    return PolicyLossOutput(torch.where(mask, -advantages * torch.exp(logprobs - old_logprobs), 0.0))

def bare(logprobs, old_logprobs, advantages, mask, **rest):
    return -logprobs

def detached(logprobs, old_logprobs, advantages, mask, **rest):
    return PolicyLossOutput(torch.zeros_like(logprobs))

def broken(logprobs, old_logprobs, advantages, mask, clip_low):
    return PolicyLossOutput(-logprobs)

def not_for_nothing(logprobs, old_logprobs, advantages, mask, **rest):
    logprobs.detach().max()
    return sound(logprobs, old_logprobs, advantages, mask)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return write_config(tmp_path)


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_launch(load_config(path, overrides), str(path))
    return caught.value.problems


def test_the_default_is_dapo() -> None:
    section = AlgorithmSection()
    assert (section.adv_estimator, section.policy_loss, section.adv_std) == ("dapo", "clip", "sample")
    assert section.kl.coef == section.entropy_coef == 0.0 and not section.overlong_filtering
    assert section.off_policy.mask_band is None and section.off_policy.geometric_band is None
    assert section.remarks() == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["algorithm.adv_estimator=gpro"],
            "algorithm.adv_estimator: 'gpro' is not known; use one of grpo, dapo, dr_grpo",
        ),
        (
            ["algorithm.policy_loss=ppo"],
            "algorithm.policy_loss: 'ppo' is not known; use one of clip, gspo, cispo, pg, or an",
        ),
        (["algorithm.off_policy.mask_low=6"], "algorithm.off_policy.mask_low=6 is not below mask_high=5"),
        (
            ["algorithm.off_policy.bound=mask", "algorithm.off_policy.level=off"],
            "algorithm.off_policy.bound=mask needs importance weights",
        ),
        (
            ["algorithm.off_policy.geometric_low=1.1", "algorithm.off_policy.geometric_high=1.1"],
            "algorithm.off_policy.geometric_low=1.1 is not below geometric_high=1.1",
        ),
        (
            ["algorithm.off_policy.bound=mask", "algorithm.off_policy.mode=bypass"],
            "algorithm.off_policy.bound=mask never acts with mode=bypass",
        ),
        (
            ["algorithm.off_policy.geometric_high=2", "algorithm.off_policy.mode=bypass"],
            "algorithm.off_policy.geometric_low/geometric_high never acts with mode=bypass",
        ),
        (
            ["algorithm.kl.coef=0.1", "megatron.overlap_param_gather=true"],
            "algorithm.kl.coef above 0 swaps the reference weights in",
        ),
        (["algorithm.kl.kind=k4"], "algorithm.kl.kind: 'k4' (str) given"),
    ],
)
def test_what_cannot_work_is_refused_by_key(path: Path, overrides: list[str], problem: str) -> None:
    (found,) = problems_of(path, *overrides)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.policy_loss=pg", "algorithm.clip_ratio_high=0.3"], "algorithm.clip_ratio_high has no effect"),
        (["algorithm.policy_loss=cispo", "algorithm.clip_ratio_c=null"], "algorithm.clip_ratio_c has no effect"),
        (["algorithm.adv_estimator=rloo", "algorithm.adv_std=population"], "algorithm.adv_std has no effect"),
        (["algorithm.policy_loss=gspo"], "the paper has 3e-4 and 4e-4"),
        (["algorithm.policy_loss=pg", "algorithm.off_policy.mode=bypass"], "corrects nothing"),
    ],
)
def test_a_setting_without_effect_is_remarked(path: Path, overrides: list[str], words: str) -> None:
    remarks = [r for r in check_launch(load_config(path, overrides), "c") if r.startswith("algorithm.")]
    assert len(remarks) == 1 and words in remarks[0]


def test_sound_third_party_functions_pass(path: Path) -> None:
    overrides = ["algorithm.adv_estimator=toy_plugin:halved", "algorithm.policy_loss=toy_plugin:sound"]
    check_launch(load_config(path, overrides), "c")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("adv_estimator=no_such_module:f", "module no_such_module cannot be imported"),
        ("adv_estimator=toy_plugin:missing", "has no function missing"),
        ("adv_estimator=toy_plugin:short", "returned (1,) for rewards of shape (10,)"),
        ("adv_estimator=toy_plugin:moody", "other advantages for the same rewards at a second call"),
        ("policy_loss=toy_plugin:leaking", "gradient exactly 0"),
        ("policy_loss=toy_plugin:bare", "returned Tensor instead of PolicyLossOutput"),
        ("policy_loss=toy_plugin:detached", "has no gradient"),
        ("policy_loss=toy_plugin:broken", "failed on a tiny example: TypeError"),
        ("policy_loss=toy_plugin:not_for_nothing", "failed on a tiny example"),
    ],
)
def test_a_broken_contract_is_found_at_launch(path: Path, override: str, words: str) -> None:
    (problem,) = problems_of(path, f"algorithm.{override}")
    assert problem.startswith(f"algorithm.{override.split('=')[0]}: '{override.split('=')[1]}'")
    assert words in problem


def test_the_example_of_the_documentation_keeps_the_contract(path: Path, tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "algorithm.md").read_text(encoding="utf-8")
    (tmp_path / "my_losses.py").write_text(page.split("```python\n")[1].split("```")[0])
    check_launch(load_config(path, ["algorithm.policy_loss=my_losses:reinforce"]), "c")
