"""The generated pages are those that the code would write."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("script", "page"), [("gen_config_docs.py", "configuration.md"), ("gen_metrics_docs.py", "metrics.md")]
)
def test_the_page_is_up_to_date(script: str, page: str) -> None:
    render = runpy.run_path(str(ROOT / "scripts" / script))["render"]
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == render(), f"run python scripts/{script}"


def test_every_key_has_a_meaning() -> None:
    from dapo_megatron.config.reference import iter_keys

    assert [key.path for key in iter_keys() if not key.description and key.section is None] == []
