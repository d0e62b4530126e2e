"""What the documents say about the code is true: the folders they list, the files they name, the lines they show."""

import ast
import re
import runpy
from pathlib import Path

import pytest

import camshaft
from camshaft.core import errors
from camshaft.executor.policies.base import QUEUE_POLICIES, load_policies

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "camshaft"
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
FOLDERS = ["docs", "examples", "scripts", "tests", "benchmarks", "camshaft",
           *sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")]


def test_structures_lists_every_folder_of_code_and_no_other():
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "docs/structures.md").read_text(), re.MULTILINE))
    held = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
    families = {name for name in held if name.startswith("kernels/")}  # "a family a folder", which one line says
    assert listed == held - families


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_a_document_names_exists(document):
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)", (ROOT / document).read_text())
    assert [path for path in named if not any((base / path.rstrip(".")).exists() for base in (ROOT, PACKAGE))] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_lines_of_a_document_use_what_the_package_offers(document):
    for lines in re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL):
        tree = ast.parse(lines)
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "camshaft"
                 for alias in node.names]
        assert set(names) <= set(camshaft.__all__)


def test_the_readme_shows_how_to_begin():
    assert "from camshaft import LLM" in (ROOT / "README.md").read_text()


def test_the_configuration_reference_is_what_its_generator_writes():
    page = runpy.run_path(str(ROOT / "docs/reference/generate.py"))["page"]
    assert (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8") == page()


def test_every_error_has_its_row_in_troubleshooting():
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE))
    kinds = {name for name, thing in vars(errors).items()
             if isinstance(thing, type) and issubclass(thing, errors.CamshaftError)}
    assert kinds - listed <= {"CamshaftError"}
    assert listed <= kinds


def test_the_policy_shown_in_adding_a_policy_is_one(monkeypatch):
    load_policies()
    monkeypatch.setattr(QUEUE_POLICIES, "_entries", dict(QUEUE_POLICIES._entries))
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding/policy.md").read_text(), re.DOTALL)
    exec(compile(lines, "docs/adding/policy.md", "exec"), {})
    from camshaft.config.runtime import SchedulerConfig
    from camshaft.testing.executor_rig import ExecutorRig, RigConfig

    scheduler = SchedulerConfig(max_batch_size=1, max_num_tokens=16, overlap_depth=0, queue_policy="shortest_first")
    rig = ExecutorRig(RigConfig(scheduler=scheduler))
    long, short = rig.add([1, 2], 20), rig.add([3, 4], 5)
    while not rig.told[short].finals:
        assert not rig.told[long].finals
        rig.executor.step()
    rig.run()
    rig.check_told()
    rig.check_drained()
