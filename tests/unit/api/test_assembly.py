"""What an LLM refuses before it looks for a model or builds anything."""

import pytest

from camshaft import LLM
from camshaft.core.errors import UserError


@pytest.mark.parametrize(("settings", "field"), [
    ({"scheduler": {"capacity_policy": "first_of_mine"}}, "scheduler.capacity_policy"),
    ({"scheduler": {"overlap": 1}}, "overlap"), ({"kv_cache": 5}, "kv_cache"), ({"dtype": "fp32"}, "dtype"),
    ({"max_seq_length": 64}, "max_seq_length")])
def test_settings_are_refused_before_the_model_is_looked_for(tmp_path, settings, field):
    with pytest.raises(UserError) as refused:
        LLM(tmp_path / "no_such_model", **settings)
    assert refused.value.field == field


def test_a_revision_of_the_default_model_is_refused_not_dropped():
    with pytest.raises(UserError, match="revision"):
        LLM(revision="main")
