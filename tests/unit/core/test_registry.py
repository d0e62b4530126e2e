"""The one registry: duplicates and unknown names are loud."""

import pytest

from camshaft.core.errors import InternalError, UserError
from camshaft.core.registry import Registry


def test_things_are_found_under_every_name_they_were_given_and_listed_in_order():
    animals = Registry("animal")
    assert animals.register("dog", "hound")("barks") == "barks"
    animals.add("cat", "purrs")
    assert (animals.get("hound"), animals.names(), list(animals)) == ("barks", ("cat", "dog", "hound"),
                                                                      ["purrs", "barks", "barks"])
    assert "cat" in animals
    assert len(animals) == 3


def test_a_name_is_given_once():
    animals = Registry("animal")
    animals.add("dog", 1)
    with pytest.raises(InternalError, match="animal 'dog' is registered twice"):
        animals.add("dog", 1)


def test_an_unknown_name_is_refused_with_the_nearest_known_one():
    animals = Registry("animal")
    with pytest.raises(UserError, match="known: none"):
        animals.get("dog")
    animals.add("dog", 1)
    with pytest.raises(UserError, match="Did you mean 'dog'"):
        animals.get("dot")
