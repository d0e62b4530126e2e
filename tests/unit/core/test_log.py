"""The log level: what CAMSHAFT_LOG may say, and what happens when it says something else."""

import logging

import pytest

from camshaft.core.errors import UserError
from camshaft.core.log import configure_logging, logger


@pytest.fixture(autouse=True)
def level_kept():
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.mark.parametrize(("text", "level"), [
    ("debug", logging.DEBUG), ("INFO", logging.INFO), ("error", logging.ERROR), ("", logging.WARNING)])
def test_the_level_is_taken_from_the_environment(monkeypatch, text, level):
    monkeypatch.setenv("CAMSHAFT_LOG", text)
    configure_logging()
    assert logger.level == level


@pytest.mark.parametrize("text", ["verbose", "notset", "10"])
def test_an_unknown_level_is_refused_not_replaced(monkeypatch, text):
    monkeypatch.setenv("CAMSHAFT_LOG", text)
    with pytest.raises(UserError, match="debug, info, warning, error"):
        configure_logging()
