"""The `algorithm` block. docs/algorithm.md gives the formula behind every key."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rollout_service.config import Section

# The functions behind these names are in `dapo_megatron.algorithm.registry`; they are listed here because a
# configuration is checked without importing torch.
ADVANTAGE_ESTIMATORS = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce_plus_plus")
POLICY_LOSSES = ("clip", "gspo", "cispo", "pg")
# `package.module:function`
IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_import_path(name: str) -> bool:
    """Whether a name means a third-party function instead of a built-in one."""
    return IMPORT_PATH.fullmatch(name) is not None


def _check_name(name: str, known: tuple[str, ...]) -> str:
    if name not in known and not is_import_path(name):
        raise ValueError(
            f"{name!r} is not known; use one of {', '.join(known)}, or an import path package.module:function"
        )
    return name


class OffPolicySection(Section):
    """Correction for the gap between the engines' policy and the trainer's."""

    mode: Literal["decoupled", "bypass"] = Field(
        "decoupled",
        description="`decoupled` recomputes the old log-probs with the trainer's weights; `bypass` uses the engines' log-probs as old.",
    )
    level: Literal["token", "sequence", "off"] = Field(
        "token", description="Importance weight per token, per sequence (product of its tokens'), or none."
    )
    bound: Literal["truncate", "mask"] = Field(
        "truncate",
        description="What happens to a large weight: `truncate` cuts it to `cap`; `mask` takes weights outside [`mask_low`, `mask_high`] out of the loss.",
    )
    cap: float = Field(2.0, gt=0, description="Upper bound C of a truncated importance weight.")
    mask_low: float = Field(0.5, ge=0, description="Smallest importance weight that `bound: mask` keeps.")
    mask_high: float = Field(5.0, gt=0, description="Largest importance weight that `bound: mask` keeps.")
    geometric_low: float | None = Field(
        None,
        gt=0,
        description="Responses whose geometric-mean ratio of old to engine probability is smaller are rejected; null is off.",
    )
    geometric_high: float | None = Field(None, gt=0, description="The same for larger ratios; null is off.")

    @property
    def mask_band(self) -> tuple[float, float] | None:
        return (self.mask_low, self.mask_high) if self.bound == "mask" else None

    @property
    def geometric_band(self) -> tuple[float | None, float | None] | None:
        band = (self.geometric_low, self.geometric_high)
        return None if band == (None, None) else band

    @model_validator(mode="after")
    def _check(self) -> OffPolicySection:
        if self.mask_low >= self.mask_high:
            raise ValueError(f"mask_low={self.mask_low:g} is not below mask_high={self.mask_high:g}")
        if self.bound == "mask" and self.level == "off":
            raise ValueError("bound=mask needs importance weights: set level to token or sequence")
        low, high = self.geometric_band or (None, None)
        if low is not None and high is not None and low >= high:
            raise ValueError(f"geometric_low={low:g} is not below geometric_high={high:g}")
        if self.mode == "bypass":
            for key, given in (("bound=mask", self.mask_band), ("geometric_low/geometric_high", self.geometric_band)):
                if given is not None:
                    raise ValueError(
                        f"{key} never acts with mode=bypass, where old and engine log-probs are the same: use "
                        f"mode=decoupled, or leave it out"
                    )
        return self


class KLSection(Section):
    """Penalty on the distance from the reference policy, the starting weights. Off in DAPO."""

    coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL term in the loss; 0 is off (no reference is kept, no reference log-probs computed).",
    )
    kind: Literal["k1", "k2", "k3", "low_var_kl"] = Field(
        "low_var_kl",
        description="Estimator per token: `k1` log-ratio, `k2` half its square, `k3` exp(-d) + d - 1, `low_var_kl` k3 bounded to [-10, 10].",
    )


class AlgorithmSection(Section):
    """DAPO (arXiv 2503.14476)."""

    adv_estimator: str = Field(
        "dapo",
        description="Advantage: `grpo` (= `dapo`), `dr_grpo`, `rloo`, `reinforce_plus_plus`, or an import path `package.module:function`.",
    )
    adv_std: Literal["sample", "population"] = Field(
        "sample",
        description="Standard deviation with n - 1 (`sample`) or n (`population`); grpo, dapo and reinforce_plus_plus.",
    )
    adv_eps: float = Field(
        1e-6, ge=0, description="Added to the standard deviation; grpo, dapo and reinforce_plus_plus."
    )
    policy_loss: str = Field(
        "clip",
        description="Loss: `clip` (decoupled and dual clip), `gspo`, `cispo`, `pg`, or an import path `package.module:function`.",
    )
    clip_ratio_low: float = Field(
        0.2, ge=0, le=1, description="eps_low: the ratio is clipped below 1 - eps_low (1: never); clip, gspo and cispo."
    )
    clip_ratio_high: float = Field(
        0.28, ge=0, description="eps_high: the ratio is clipped above 1 + eps_high (clip-higher); clip, gspo and cispo."
    )
    clip_ratio_c: float | None = Field(
        10.0, gt=1, description="Dual-clip bound for negative advantages, null is off; clip and gspo."
    )
    loss_agg_mode: Literal[
        "token-mean", "group-token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = Field(
        "token-mean", description="How token losses become one number; denominators are global to the mini-batch."
    )
    overlong_filtering: bool = Field(
        False,
        description="Take responses that ended at the length limit out of the loss and its denominators (they stay in their group's statistics).",
    )
    entropy_coef: float = Field(
        0.0, ge=0, description="Weight of the entropy bonus, which is subtracted from the loss; 0 is off."
    )
    kl: KLSection = KLSection()
    off_policy: OffPolicySection = OffPolicySection()

    @field_validator("adv_estimator")
    @classmethod
    def _known_estimator(cls, name: str) -> str:
        return _check_name(name, ADVANTAGE_ESTIMATORS)

    @field_validator("policy_loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return _check_name(name, POLICY_LOSSES)

    def remarks(self) -> list[str]:
        """Legal settings that rarely mean what they say."""
        remarks = []
        defaults = type(self).model_fields
        unread = {"cispo": ("clip_ratio_c",), "pg": ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
        for key in unread.get(self.policy_loss, ()):
            if getattr(self, key) != defaults[key].default:
                remarks.append(f"algorithm.{key} has no effect with algorithm.policy_loss={self.policy_loss}")
        if self.adv_estimator in ("dr_grpo", "rloo"):
            for key in ("adv_std", "adv_eps"):
                if getattr(self, key) != defaults[key].default:
                    remarks.append(f"algorithm.{key} has no effect with algorithm.adv_estimator={self.adv_estimator}")
        if self.policy_loss == "gspo" and max(self.clip_ratio_low, self.clip_ratio_high) > 0.05:
            remarks.append(
                "algorithm.policy_loss=gspo clips ratios of whole responses, which stay close to 1: with "
                f"algorithm.clip_ratio_low={self.clip_ratio_low:g} and clip_ratio_high={self.clip_ratio_high:g} it will hardly "
                "ever clip (the paper has 3e-4 and 4e-4)"
            )
        if self.policy_loss == "pg" and self.off_policy.mode == "bypass":
            remarks.append(
                "algorithm.policy_loss=pg with off_policy.mode=bypass corrects nothing for the engines' older weights"
            )
        return remarks
