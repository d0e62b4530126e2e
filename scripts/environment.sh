# Sourced by the other scripts: makes the project's virtual environment and keeps it in step with pyproject.toml.
# Usage: source scripts/environment.sh EXTRAS   (EXTRAS: "", test or dev)
set -euo pipefail
caller="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment="${CAMSHAFT_ENV:-.venv}"
extras="${1:-}"
python="${PYTHON:-python3}"

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Camshaft needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Set PYTHON to a newer one." >&2
    exit 1
fi
if [ ! -x "$environment/bin/python" ]; then
    echo "Making the environment in $environment (once)…" >&2
    "$python" -m venv "$environment"
fi
stamp="$environment/.installed-${extras:-base}"
wanted="$(cat pyproject.toml scripts/constraints.txt | cksum)"
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    echo "Installing Camshaft${extras:+ [$extras]} and what it needs…" >&2
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint scripts/constraints.txt --editable ".${extras:+[$extras]}"
    echo "$wanted" > "$stamp"
fi
PATH="$(cd "$environment/bin" && pwd):$PATH"
export PATH
