"""The house rules that a machine can hold: sizes, names, docstrings, ambient state, layers."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "camshaft"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_TRITON_LINES = 120
BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|misc|new|legacy|v\d+)(_|$)")


def ids(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(params=MODULES, ids=ids, scope="module")
def module(request):
    return request.param, ast.parse(request.param.read_text(encoding="utf-8"))


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_modules_and_functions_are_small(module):
    path, tree = module
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_MODULE_LINES, f"{lines} lines: split by responsibility"
    for function in functions(tree):
        jitted = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
        length = function.end_lineno - function.lineno + 1
        assert length <= (MAX_TRITON_LINES if jitted else MAX_FUNCTION_LINES), f"{function.name}: {length} lines"


def test_names_say_what_they_hold(module):
    path, _ = module
    assert not BANNED_NAMES.search(path.stem), f"{path.stem} names no responsibility"
    assert not any(BANNED_NAMES.search(part) for part in path.relative_to(PACKAGE).parts[:-1])


def test_every_module_opens_with_its_contract(module):
    path, tree = module
    assert ast.get_docstring(tree), f"{path} has no module docstring"


def test_no_ambient_state(module):
    path, tree = module
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno} uses global"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            reads = node.attr in ("environ", "environb", "getenv", "putenv")
            assert not reads or path == PACKAGE / "core" / "env.py", f"{path}:{node.lineno} reads the environment"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            taken = {alias.name for alias in node.names} & {"environ", "environb", "getenv", "putenv"}
            assert not taken, f"{path}:{node.lineno} takes {taken} out of reach of core/env.py"


MUTABLE = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MUTABLE_TYPES = {"dict", "list", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict"}


def test_modules_and_classes_hold_nothing_that_can_change(module):
    path, tree = module
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for statement in (statement for body in bodies for statement in body):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        name, value = ast.unparse(targets[0]), statement.value
        made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in MUTABLE_TYPES
        if name not in ("__all__", "tags"):  # the language's own, and jinja2's
            assert not made, f"{path}:{statement.lineno} {name}"
            assert not isinstance(value, MUTABLE), f"{path}:{statement.lineno} {name}: use a tuple or MappingProxyType"


def test_nothing_is_left_for_later(module):
    path, _ = module
    left = re.findall(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text(encoding="utf-8"))
    assert not left, f"{path} leaves {left}"


def test_no_pickle(module):
    path, tree = module
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert "pickle" not in names, f"{path}:{node.lineno} imports pickle"
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("torch.load", "torch.save"), f"{path}:{node.lineno} pickles"


def test_layers_hold():
    lint_imports = Path(sys.executable).parent / "lint-imports"
    run = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_model_families_do_not_import_each_other():
    files = {path.stem: path.read_text(encoding="utf-8") for path in (PACKAGE / "models").glob("*.py")}
    families = {name for name, text in files.items() if "@register_family" in text}
    assert len(families) > 1
    for name, text in files.items():
        imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        assert not imported & {f"camshaft.models.{family}" for family in families}, f"{name} imports a family"


def test_every_kernel_family_is_held_independent_of_the_others():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (held,) = (contract["modules"] for contract in settings["tool"]["importlinter"]["contracts"]
               if contract["type"] == "independence")
    assert sorted(held) == sorted(f"camshaft.kernels.{path.parent.name}"
                                  for path in (PACKAGE / "kernels").glob("*/ref.py"))


def test_importing_the_package_loads_no_torch():
    code = "import sys, camshaft; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_tests_have_names_of_their_own():
    stems = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(stems) == len(set(stems)), sorted({name for name in stems if stems.count(name) > 1})
