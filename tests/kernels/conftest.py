"""The compiled CPU kernels, once a session, and the implementations they bring."""

import pytest

from camshaft.kernels.native import compile_library, find_compiler, load_library


@pytest.fixture(scope="session")
def library(compiled_kernels):
    """The native library; None where there is no C compiler."""
    path = compile_library(compiled_kernels)
    assert path is not None or find_compiler() is None, "there is a C compiler, but the kernels did not compile"
    return None if path is None else load_library(path)
