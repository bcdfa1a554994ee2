#!/usr/bin/env bash
# Sets up if needed, then checks style and types and runs every test. Arguments go to pytest:
#   ./scripts/test.sh tests/unit -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-.venv}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

./scripts/setup_env.sh
echo "test: ruff check"
"$VENV/bin/python" -m ruff check .
echo "test: ruff format"
"$VENV/bin/python" -m ruff format --check .
echo "test: mypy"
"$VENV/bin/python" -m mypy
echo "test: pytest"
exec "$VENV/bin/python" -m pytest "$@"
