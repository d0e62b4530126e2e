"""Tiny models for whole-engine tests, built once a session into an engine cache of their own."""

import pytest

from camshaft.testing.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """Folder of a tiny Llama checkpoint with tokenizer and chat template."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", seed=7)


@pytest.fixture(scope="session")
def tiny_engine(tiny_llama, tmp_path_factory):
    """Self-contained engine folder of ``tiny_llama``."""
    from camshaft.builder.build import build
    from camshaft.config.build import BuildConfig

    folder = tmp_path_factory.mktemp("engines") / "tiny"
    build(tiny_llama, BuildConfig(max_batch_size=32, max_num_tokens=512), output=folder)
    return folder
