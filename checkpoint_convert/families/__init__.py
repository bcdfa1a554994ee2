"""One table per model family, found by the `model_type` of config.json."""

from __future__ import annotations

from checkpoint_convert.families.deepseek_v3 import DEEPSEEK_V3
from checkpoint_convert.families.gemma import GEMMA
from checkpoint_convert.families.glm import GLM
from checkpoint_convert.families.glm4_moe import GLM4_MOE
from checkpoint_convert.families.llama import LLAMA
from checkpoint_convert.families.mistral import MISTRAL
from checkpoint_convert.families.mixtral import MIXTRAL
from checkpoint_convert.families.qwen2 import QWEN2
from checkpoint_convert.families.qwen3 import QWEN3
from checkpoint_convert.families.qwen3_moe import QWEN3_MOE
from checkpoint_convert.families.table import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (DEEPSEEK_V3, GEMMA, GLM, GLM4_MOE, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)
}
