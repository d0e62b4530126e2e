"""The wording of errors: what was found, what was expected, what to do."""

import ast
from pathlib import Path

import camshaft
from camshaft.core.errors import UserError

PACKAGE = Path(camshaft.__file__).parent
USER_ERRORS = {"UserError", "CheckpointError", "ModelNotFoundError", "RequestTooLargeError"}
PREDICATES = ("not ", "is ", "are ", "needs ", "cannot ", "gives ", "known:", "must ")
"""Beginnings that do not go on from "expected"."""


def test_a_user_error_reads_as_a_sentence():
    error = UserError("model", "x.gguf", "an existing file", "Check the path")
    assert str(error) == "model='x.gguf': expected an existing file. Check the path"
    assert str(UserError("top_k", -1, "a whole number")) == "top_k=-1: expected a whole number"


def _allowed_texts():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in USER_ERRORS:
                for text in node.args[2:3]:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", ast.unparse(text).lstrip("f").lstrip("'\"(")


def test_every_allowed_text_goes_on_from_expected():
    texts = list(_allowed_texts())
    assert len(texts) > 100
    assert [found for found in texts if found[1].startswith(PREDICATES)] == []
