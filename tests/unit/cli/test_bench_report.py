"""Benchmarks on given numbers: workloads, formulas, comparisons. Nothing is timed."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from camshaft.cli.bench import ReportConfig, _show_comparison
from camshaft.cli.benchmark.compare import check_comparable, compare, read_report
from camshaft.cli.benchmark.measure import Timing
from camshaft.cli.benchmark.report import (
    REPORT_VERSION,
    at,
    distribution_rows,
    output_hash,
    performance,
    report_rows,
    shown,
)
from camshaft.cli.benchmark.startup import Start, startup_report
from camshaft.cli.benchmark.workload import ConcurrentConfig, LengthRule, WorkloadConfig, make_requests
from camshaft.core.errors import InternalError, UserError


def timing(asked, first, ended, *, num_input=10, tokens=(1, 2, 3)):
    return Timing(asked_s=asked, first_s=first, ended_s=ended, num_input=num_input, num_cached=0,
                  token_ids=tuple(tokens))


def test_the_numbers_are_what_their_names_say():
    report = performance([timing(0.0, 1.0, 3.0), timing(0.0, 2.0, 4.0, num_input=30, tokens=range(5))])
    assert report["request_info"] == {"num_requests": 2, "avg_num_concurrent_requests": 7 / 4, "avg_input_length": 20.0,
                                      "avg_output_length": 4.0, "num_cached_tokens": 0}
    measured = report["performance"]
    assert measured["total_latency_ms"] == 4000.0
    assert measured["avg_request_latency_ms"] == 3500.0
    assert measured["request_throughput_req_s"] == 0.5
    assert measured["system_output_throughput_tok_s"] == 2.0
    assert measured["system_total_throughput_tok_s"] == 12.0
    assert measured["output_throughput_per_user_tok_s"] == pytest.approx((3 / 3 + 5 / 4) / 2)
    assert measured["request_latency_percentiles_ms"]["p50"] == 3500.0
    assert measured["request_latency_percentiles_ms"]["maximum"] == 4000.0
    streams = report["streaming_metrics"]
    assert streams["avg_ttft_ms"] == 1500.0
    assert streams["avg_tpot_ms"] == pytest.approx((2000 / 2 + 2000 / 4) / 2)
    assert streams["token_output_speed_tok_s"] == pytest.approx((1.0 + 2.0) / 2)
    assert streams["gen_tps_percentiles"]["minimum"] == pytest.approx(1.0)


def test_an_answer_of_one_token_has_no_time_between_tokens():
    report = performance([timing(0.0, 1.0, 1.0, tokens=(4,))])
    assert report["streaming_metrics"]["avg_tpot_ms"] is None
    assert report["streaming_metrics"]["tpot_percentiles"] is None
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    labels = [label for label, _ in report_rows(report)]
    assert "Average time to first token (TTFT)" in labels
    assert "Average time per output token (TPOT)" not in labels
    assert [label for label, _ in distribution_rows(report)] == ["Request latency, ms", "TTFT, ms"]


def test_the_hash_tells_tokens_and_where_they_lie_apart():
    tokens = [((1, 2), (3,)), ((1,), (2, 3)), ((1, 2), (4,)), ((3,), (1, 2))]
    hashes = {output_hash([timing(0, 1, 2, tokens=part) for part in parts]) for parts in tokens}
    assert len(hashes) == 4
    again = [timing(5, 6, 7, tokens=part) for part in tokens[0]]
    assert output_hash(again) in hashes


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("3:5", 3, 5), ("100,0", 100, 100)])
def test_length_rules(text, low, high):
    import numpy as np

    drawn = LengthRule.parse("input_len", text).draw(np.random.default_rng(0), 200)
    assert (min(drawn), max(drawn)) == (low, high)


def test_normal_lengths_lie_about_their_mean_and_never_below_one():
    import numpy as np

    drawn = LengthRule.parse("input_len", "5,20").draw(np.random.default_rng(0), 500)
    assert min(drawn) == 1
    assert len(set(drawn)) > 10


@pytest.mark.parametrize("text", ["", "0", "-3", "5:4", "0:4", "a", "1,2,3", "1.5", "3:", "9" * 30])
def test_a_length_that_is_none_is_refused_by_name(text):
    with pytest.raises(UserError, match="output_len"):
        WorkloadConfig(output_len=text)


@pytest.mark.parametrize("change", [{"num_requests": 0}, {"warmup": -1}, {"seed": -1}, {"concurrency": 0}])
def test_bounds_of_a_workload(change):
    with pytest.raises(UserError, match=next(iter(change))):
        ConcurrentConfig(**change)


def test_equal_seeds_make_equal_requests_and_warm_up_shares_none():
    config = WorkloadConfig(num_requests=5, input_len="3:9", output_len="2:4", warmup=3)
    warmup, measured = make_requests(config, 100, len)
    assert (warmup, measured) == make_requests(config, 100, len)
    assert (len(warmup), len(measured)) == (3, 5)
    assert all(3 <= len(request.prompt_token_ids) <= 9 and 2 <= request.output_len <= 4 for request in measured)
    assert not {tuple(r.prompt_token_ids[:3]) for r in warmup} & {tuple(r.prompt_token_ids[:3]) for r in measured}
    other = make_requests(WorkloadConfig(num_requests=5, input_len="3:9", output_len="2:4", seed=1), 100, len)
    assert other[1] != measured


def test_a_dataset_gives_prompts_and_lengths(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"task_id": 0, "prompt": "abc", "output_tokens": 4}\n\n'
                    '{"task_id": 1, "input_ids": [5, 6], "output_tokens": 2}\n')
    measured = make_requests(WorkloadConfig(dataset=path), 100, lambda text: [ord(sign) for sign in text])[1]
    assert [(r.prompt_token_ids, r.output_len) for r in measured] == [([97, 98, 99], 4), ([5, 6], 2)]
    with pytest.raises(UserError, match="at most the dataset's 2"):
        make_requests(WorkloadConfig(dataset=path, num_requests=3), 100, list)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": "a"}', '{"prompt": "a", "output_tokens": 0}',
                                  '{"prompt": "a", "input_ids": [1], "output_tokens": 1}',
                                  '{"input_ids": [], "output_tokens": 1}', '{"input_ids": ["a"], "output_tokens": 1}',
                                  '{"prompt": 7, "output_tokens": 1}', '{"prompt": "a", "output_tokens": true}'])
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "fine", "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2"):
        make_requests(WorkloadConfig(dataset=path), 100, lambda text: [1])


def report(throughput=100.0, ttft=10.0, **changes):
    return {"benchmark": "throughput", "report_version": REPORT_VERSION,
            "configuration": {"threads": 2, "build": {"dtype": "float32"}}, "environment": {"device": {"name": "a"}},
            "performance": {"request_throughput_req_s": throughput,
                            "request_latency_percentiles_ms": {"p99": 5.0}},
            "streaming_metrics": {"avg_ttft_ms": ttft, "avg_tpot_ms": None}, "output_sha256": "x", **changes}


@pytest.mark.parametrize(("new", "worse"), [
    (report(95.1, 10.4), []), (report(200.0, 1.0), []),
    (report(94.0), ["performance.request_throughput_req_s"]), (report(ttft=10.6), ["streaming_metrics.avg_ttft_ms"]),
    (report(performance={"request_latency_percentiles_ms": {"p99": 50.0}}), [])])
def test_a_regression_is_what_became_worse_by_more_than_the_tolerance(new, worse):
    found = compare(report(), new, 0.05)
    assert [metric.place for metric in found.regressions] == worse


def test_a_comparison_shows_ratios_and_says_what_else_changed():
    found = compare(report(), report(150.0, environment={"device": {"name": "b"}}, output_sha256="y"), 0.05)
    assert found.metrics[0].ratio == 1.5
    assert found.notes == ("device.name was 'a', is 'b'", "the output tokens differ")


def test_no_name_of_a_number_is_cut_off_where_the_terminal_is_narrow():
    shown_at_60 = io.StringIO()
    _show_comparison(Console(file=shown_at_60, width=60), report(), report(), ReportConfig(compare=Path("old.json")))
    assert "…" not in shown_at_60.getvalue()


def test_another_configuration_is_refused_by_name_and_a_setting_of_a_later_version_is_not():
    old = report()
    with pytest.raises(UserError, match=r"build\.dtype"):
        check_comparable(old, {"threads": 2, "build": {"dtype": "bfloat16"}})
    later = {"threads": 2, "build": {"dtype": "float32", "quantization": "none"}}
    check_comparable(old, later)
    assert "only one report knows build.quantization" in compare(old, report(configuration=later), 0.05).notes


@pytest.mark.parametrize("changes", [
    {"performance": {"request_throughput_req_s": "fast"}}, {"performance": {"request_throughput_req_s": float("nan")}},
    {"performance": {"request_throughput_req_s": [1]}}, {"streaming_metrics": {"avg_ttft_ms": True}},
    {"performance": None, "streaming_metrics": None}, {"environment": [1]}, {"configuration": None}])
def test_a_report_whose_numbers_are_none_is_refused_and_never_compared(tmp_path, changes):
    (tmp_path / "old.json").write_text(json.dumps(report(**changes)))
    with pytest.raises(UserError, match="compare"):
        read_report(tmp_path / "old.json", "throughput")


def test_another_dataset_of_the_same_name_is_another_configuration(tmp_path):
    settings = []
    for folder, text in (("a", "one"), ("b", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "d.jsonl").write_text(json.dumps({"prompt": text, "output_tokens": 1}) + "\n")
        settings.append({"workload": WorkloadConfig(dataset=tmp_path / folder / "d.jsonl").to_dict()})
    with pytest.raises(UserError, match="dataset_sha256"):
        check_comparable(report(configuration=settings[0]), settings[1])


@pytest.mark.parametrize("lengths", [{"input_len": "2147483647"}, {"input_len": "5,2000000000"},
                                     {"output_len": "1:2147483647"}])
def test_lengths_beyond_the_engine_are_refused_before_they_are_drawn(lengths):
    with pytest.raises(UserError, match="max_seq_len"):
        make_requests(WorkloadConfig(num_requests=8, **lengths), 100, list, longest=512)
    with pytest.raises(UserError, match="num_requests"):
        WorkloadConfig(num_requests=10**9)


@pytest.mark.parametrize("content", ["", "[" * 100000, "{}", "[1]", json.dumps(report(benchmark="latency")),
                                     json.dumps(report(report_version=REPORT_VERSION + 1))])
def test_a_file_that_is_no_report_of_this_kind_is_refused(tmp_path, content):
    (tmp_path / "old.json").write_text(content)
    with pytest.raises(UserError, match="compare"):
        read_report(tmp_path / "old.json", "throughput")


def test_a_report_of_starts():
    starts = [Start(1.0, 2.0, 0.5, 7), Start(1.2, 2.0, 0.5, 7), Start(5.0, 2.0, 0.5, 7)]
    found = startup_report({"cold": starts, "cached": starts[:1]})
    assert at(found, "startup.cold.import_s.p50") == 1.2
    assert at(found, "startup.cold.build_s.maximum") == 2.0
    assert at(found, "startup.cached.total_s.p50") == 3.5
    assert at(found, "startup.cached.build_s") is None
    assert ("cached: load, s", at(found, "startup.cached.load_s")) in distribution_rows(found)
    with pytest.raises(InternalError, match="different first tokens"):
        startup_report({"cached": [*starts, Start(1.0, 2.0, 0.5, 8)]})


def test_numbers_for_people():
    assert [shown(value) for value in (7, 0.123456, 12.3456, 12345.6)] == ["7", "0.1235", "12.35", "12346"]
