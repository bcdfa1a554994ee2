"""Runs the rollout service like `dapo rollout`: `service_driver.py SETTINGS.json`."""

from __future__ import annotations

import sys
from pathlib import Path

from rollout_service.config import ServiceSettings
from rollout_service.run import run_service

if __name__ == "__main__":
    run_service(ServiceSettings.model_validate_json(Path(sys.argv[1]).read_text()))
