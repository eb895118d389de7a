#!/bin/sh
# Finds a Python that is new enough and lets tools/setup_env.py do the rest.
set -eu
here=$(dirname "$0")
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

for python in "${PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3; do
    [ -n "$python" ] || continue
    if "$python" -c "$new_enough" >/dev/null 2>&1; then
        exec "$python" "$here/setup_env.py" "$@"
    fi
done

echo "setup: needs Python 3.11 or newer, found none (on Debian or Ubuntu: apt install python3 python3-venv)" >&2
exit 2
