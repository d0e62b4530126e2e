"""What the documents say about the code is true: the folders they list, the files they name, the lines they show."""

import ast
import re
from pathlib import Path

import pytest

import camshaft

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/structures.md", "docs/adding/model.md"]


def test_structures_lists_every_folder_of_code_and_no_other():
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "docs/structures.md").read_text(), re.MULTILINE))
    package = ROOT / "camshaft"
    held = {str(path.parent.relative_to(package)) for path in package.rglob("*.py") if path.parent != package}
    families = {name for name in held if name.startswith("kernels/")}  # "a family a folder", which one line says
    assert listed == held - families


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_a_document_names_exists(document):
    named = re.findall(r"`((?:camshaft|docs|examples|scripts|tests|benchmarks|models|frontend|builder|engine|ir|passes)"
                       r"/[\w./-]*)", (ROOT / document).read_text())
    assert [path for path in named if
            not any((base / path.rstrip(".")).exists() for base in (ROOT, ROOT / "camshaft"))] == []


def test_the_readmes_lines_use_what_the_package_offers():
    lines = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert lines is not None
    tree = ast.parse(lines[1])
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert names
    assert set(names) <= set(camshaft.__all__)
