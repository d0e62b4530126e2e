"""Stops by id and length over many rows: small and large sets, minimum, limits, rows handed on."""

import numpy as np
import pytest

from camshaft.executor.decoder.stop import CONTINUE, LENGTH, STOP, StopTable


def verdict(table, row, token, count, limit=100):
    ids = [np.array([value], np.int32) for value in (row, token, count, limit)]
    return int(table.verdicts(*ids)[0])


@pytest.fixture(params=[1, 8, 9, 40], ids=lambda size: f"{size}_ids")
def stops(request):
    return frozenset(range(100, 100 + request.param))


def test_every_stop_id_stops_and_no_other(stops):
    table = StopTable(3)
    table.set_row(1, stops, 0)
    assert {verdict(table, 1, token, 1) for token in stops} == {STOP}
    assert verdict(table, 1, 0, 1) == verdict(table, 1, 99, 1) == CONTINUE
    assert verdict(table, 0, 100, 1) == CONTINUE


def test_no_stop_before_min_tokens_came_first(stops):
    table = StopTable(1)
    table.set_row(0, stops, 3)
    assert [verdict(table, 0, 100, count) for count in (1, 2, 3, 4)] == [CONTINUE, CONTINUE, CONTINUE, STOP]


def test_length_ends_and_a_stop_id_on_the_last_token_wins(stops):
    table = StopTable(1)
    table.set_row(0, stops, 0)
    assert verdict(table, 0, 5, 7, limit=8) == CONTINUE
    assert verdict(table, 0, 5, 8, limit=8) == LENGTH
    assert verdict(table, 0, 100, 8, limit=8) == STOP


def test_a_row_handed_on_forgets_its_stops(stops):
    table = StopTable(1)
    table.set_row(0, stops, 5)
    table.set_row(0, frozenset(), 0)
    assert verdict(table, 0, 100, 1) == CONTINUE
    table.set_row(0, frozenset({7}), 0)
    assert verdict(table, 0, 7, 1) == STOP
    assert verdict(table, 0, 0, 1) == CONTINUE


def test_rows_are_judged_each_by_its_own_rules():
    table = StopTable(4)
    table.set_row(0, frozenset({1}), 0)
    table.set_row(2, frozenset({2}), 9)
    table.set_row(3, frozenset(range(20)), 0)
    rows, tokens = np.array([3, 0, 1, 2], np.int32), np.array([19, 2, 2, 2], np.int32)
    counts, limits = np.array([4, 4, 4, 4], np.int32), np.array([9, 9, 4, 9], np.int32)
    assert table.verdicts(rows, tokens, counts, limits).tolist() == [STOP, CONTINUE, LENGTH, CONTINUE]
