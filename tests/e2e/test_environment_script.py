"""scripts/environment.sh with a stand-in for Python: what it makes, mends and leaves alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Knows `-c`, `-m venv FOLDER` and `-m pip`; notes each call. A `no-pip` file beside it: a half-made environment.
STAND_IN = """#!/usr/bin/env bash
here="$(dirname "$0")"
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; rm -f "$3/bin/no-pip" ;;
    "-m pip") [ ! -e "$here/no-pip" ] || exit 1 ;;
esac
echo "$*" >> "$CALLS"
"""


@pytest.fixture
def start(tmp_path):
    """A checkout with only the script; calling it sources the script and gives the calls Python got."""
    checkout, python, calls = tmp_path / "checkout", tmp_path / "python3", tmp_path / "calls"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/environment.sh", "scripts/constraints.txt"):
        shutil.copy(ROOT / name, checkout / name)
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run():
        calls.write_text("")
        subprocess.run(["bash", "-c", 'source scripts/environment.sh ""'], cwd=checkout, check=True, timeout=30,
                       capture_output=True,
                       env={"PATH": "/usr/bin:/bin", "PYTHON": str(python), "CALLS": str(calls)})
        return [line for line in calls.read_text().splitlines() if line.startswith(("-m venv", "-m pip install"))]

    run.environment = checkout / ".venv"
    return run


def test_the_first_start_makes_and_installs_the_next_does_neither(start):
    venv, install = start()
    assert venv == "-m venv .venv"
    assert install.endswith("--editable .")
    assert start() == []


def test_an_environment_whose_making_was_interrupted_is_made_again(start):
    start()
    (start.environment / "bin" / "no-pip").touch()
    (start.environment / ".installed-base").unlink()
    assert start()[0] == "-m venv .venv"
    assert start() == []


def test_an_environment_whose_python_left_the_machine_is_made_again(start):
    start()
    python = start.environment / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    assert [call.split()[1] for call in start()] == ["venv", "pip"]


def test_the_install_is_a_plain_path_entry(start):
    # an import hook would lose to a folder named camshaft, such as a clone, beside the script that is run
    assert "--config-settings editable_mode=compat" in start()[1]
