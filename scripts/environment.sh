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
stamp="$environment/.installed-${extras:-base}"
wanted="$(cat pyproject.toml scripts/constraints.txt | cksum)"
if [ ! -x "$environment/bin/python" ] || [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    if ! "$environment/bin/python" -m pip --version >/dev/null 2>&1; then
        # none yet, one whose making was interrupted, or one whose Python has left the machine
        echo "Making the environment in $environment (once)…" >&2
        rm -f "$environment"/bin/python* "$environment"/.installed-*
        "$python" -m venv "$environment"
    fi
    echo "Installing Camshaft${extras:+ [$extras]} and what it needs (PyTorch is a large download)…" >&2
    # compat: a plain path entry, which a folder named camshaft beside the user's own script cannot hide
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
        --config-settings editable_mode=compat \
        --constraint scripts/constraints.txt --editable ".${extras:+[$extras]}"
    echo "$wanted" > "$stamp"
fi
PATH="$(cd "$environment/bin" && pwd):$PATH"
export PATH
