#!/bin/sh
# Finds a Python and lets it make or mend the environment. PYTHON=... names one.
set -u
cd "$(dirname "$0")/.." || exit 1

recent() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}
complete() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

if [ -n "${PYTHON:-}" ]; then
    recent "$PYTHON" && exec "$PYTHON" -m tools.environment
    echo "setup: PYTHON=$PYTHON does not start, or is older than 3.11" >&2
    exit 1
fi
found=
for python in python3.13 python3.12 python3.11 python3 python; do
    recent "$python" || continue
    complete "$python" && exec "$python" -m tools.environment
    found=$python
done
if [ -n "$found" ]; then
    echo "setup: $found has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)" >&2
else
    echo "setup: no Python of 3.11 or newer on the path: install one, or name it by PYTHON=/path/to/python" >&2
fi
exit 1
