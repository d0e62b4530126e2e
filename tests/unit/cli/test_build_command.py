"""``camshaft build``: what it refuses before it does anything."""

import pytest
from typer.main import get_command

from camshaft.cli.main import app
from camshaft.core.errors import UserError


def test_a_revision_of_the_default_model_is_refused_not_dropped(tmp_path):
    with pytest.raises(UserError, match="revision"):
        get_command(app).main(["build", "--output", str(tmp_path / "engine"), "--revision", "main"],
                              standalone_mode=False)
    assert not (tmp_path / "engine").exists()
