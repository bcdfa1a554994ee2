#!/usr/bin/env bash
# Sets up if needed, then trains a tiny model on a CPU. Arguments are overrides:
#   ./scripts/quickstart.sh trainer.total_steps=3 run.name=short
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

./scripts/setup_env.sh
exec "$VENV/bin/dapo" run configs/quickstart.yaml "$@"
