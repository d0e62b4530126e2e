"""A recorded trace runs again to the same tokens, says where it differs, and outlives what cut it off."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from camshaft import LLM, SamplingParams, UserError
from camshaft.cli.main import app
from camshaft.executor.replay import replay, summarise
from camshaft.executor.trace import RecordingRunner, TraceHeader, TraceWriter, read_trace
from camshaft.runtime.step import StepOutput, StepPlan

KV = {"max_bytes": 2**22}
PROMPTS = ["a valve opens", "a valve opens when its lobe passes", "The capital of France is"]


def replayed(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def record(engine, path, *params, **options):
    with LLM(engine, kv_cache=KV, trace=path, **options) as llm:
        return [llm.generate(PROMPTS, each) for each in params]


@pytest.fixture(scope="module")
def trace(tiny_engine, tmp_path_factory):
    """A run with sampling, penalties, log-probabilities, scores, a shared prefix and chunks."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    record(tiny_engine, path, SamplingParams(max_tokens=9, ignore_eos=True),
           SamplingParams(max_tokens=6, temperature=0.9, seed=4, repetition_penalty=1.3, logprobs=2, prompt_logprobs=1,
                          ignore_eos=True), scheduler={"context_chunk_tokens": 4})
    return path


def test_a_replay_finds_every_token_again(trace):
    shown = replayed(trace)
    assert shown.exit_code == 0, shown.output
    assert f"Equal: {3 * (9 + 6)} tokens" in shown.output


def test_a_changed_token_is_found_with_its_step_and_row(trace, tmp_path):
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    line = next(line for line in lines if line.get("output", {}).get("token_ids", {}).get("int32"))
    line["output"]["token_ids"]["int32"][-1] ^= 1
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = replayed(changed, "--json")
    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert (found["num_different_steps"], found["first"]["step"], found["first"]["what"]) == (1, line["step"],
                                                                                             "token_ids")
    assert found["first"]["row"] == line["output"]["rows"]["int32"][-1]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_trace_with_preemptions_in_it_is_replayed_to_the_same_tokens(tiny_engine, tmp_path, depth):
    path, rng = tmp_path / "t.jsonl", np.random.default_rng(2)
    prompts = [rng.integers(1, 300, rng.integers(4, 40)).tolist() for _ in range(10)]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8 * (index % 2), seed=index,
                             repetition_penalty=1.3 if index % 3 else None, n=1 + index % 2,
                             no_repeat_ngram_size=2 if index % 4 == 0 else None, logprobs=2 if index % 5 == 0 else None,
                             prompt_logprobs=1 if index % 5 == 1 else None) for index in range(10)]
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**16 + 2**13}, trace=path, scheduler={
            "capacity_policy": "max_utilization", "overlap_depth": depth, "context_chunk_tokens": 32}) as llm:
        llm.generate(prompts, params)
        assert llm.get_stats()["counters"]["num_preemptions"] > 0
    shown = replayed(path)
    assert (shown.exit_code, "Equal" in shown.output) == (0, True), shown.output


def rewritten(trace, path, change):
    """The trace with ``change(lines)`` applied to its parsed lines; ``lines[1:]`` are plans and outcomes."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def of_kind(lines, kind, holds=lambda part: True):
    return next(line[kind] for line in lines[1:] if kind in line and holds(line[kind]))


def scored(lines):
    return of_kind(lines, "output", lambda output: output.get("logprobs"))["logprobs"]


EDITS = {
    "a log-probability that rounding cannot explain": lambda lines: scored(lines)["logprobs"]["float32"].__setitem__(
        0, -700.0),
    "a log-probability that is no number": lambda lines: scored(lines)["top_logprobs"]["float32"].__setitem__(0, "nan"),
    "a rank": lambda lines: scored(lines)["ranks"]["int32"].__setitem__(0, 299),
    "a likeliest id": lambda lines: scored(lines)["top_ids"]["int32"].__setitem__(0, 319),
    "an unsound score": lambda lines: of_kind(lines, "output", lambda output: output.get("scores"))[
        "scores"]["finite"]["bool"].__setitem__(0, False),
    "log-probabilities left out": lambda lines: of_kind(lines, "output", lambda output: output.get("logprobs")).pop(
        "logprobs"),
    "a failure that was none": lambda lines: of_kind(lines, "output").update(failures=[[0, "UserError: x"]]),
    "a page of another row": lambda lines: of_kind(lines, "plan", lambda plan: plan["page_updates"][0]["rows"][
        "int32"])["page_updates"][0]["pages"].update(int32=[10**6]),
    "one position for all rows": lambda lines: of_kind(lines, "plan", lambda plan: len(plan["rows"]["int32"]) > 1)[
        "start_positions"].update(int32=[0]),
    "rows fed beyond memory": lambda lines: of_kind(lines, "plan")["query_lens"].update(int32=[2**31 - 1] * 3),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_trace_is_never_called_equal(trace, tmp_path, edit):
    shown = replayed(rewritten(trace, tmp_path / "t.jsonl", EDITS[edit]))
    assert (shown.exit_code, "Different" in shown.output) == (1, True), shown.output


BREAKS = {
    "a plan left out": lambda lines: lines.pop(5),
    "an output left out": lambda lines: lines.remove(next(line for line in lines[1:] if "output" in line)),
    "a line twice": lambda lines: lines.insert(3, lines[2]),
    "two steps left out": lambda lines: lines.__delitem__(slice(7, 11)),
    "an outcome of nobody": lambda lines: lines.append({"step": 9999, "runner_us": 1, "failure": "x"}),
    "an output of another step": lambda lines: of_kind(lines, "output").update(step=77),
    "a token that is no whole number": lambda lines: of_kind(lines, "output", lambda output: output["token_ids"][
        "int32"])["token_ids"]["int32"].__setitem__(0, 1.7),
    "a token in quotes": lambda lines: of_kind(lines, "output", lambda output: output["token_ids"]["int32"])[
        "token_ids"]["int32"].__setitem__(0, "3"),
    "a switch that is a number": lambda lines: of_kind(lines, "output", lambda output: output["finite"]["bool"])[
        "finite"]["bool"].__setitem__(0, 5),
    "an endless time": lambda lines: lines[1].update(host_us=float("inf")),
    "a header without its device": lambda lines: lines[0].update(device=[]),
    "a header with odd pages": lambda lines: lines[0].update(num_pages=["many"]),
    "a header with pages beyond all": lambda lines: lines[0].update(num_pages=[10**30]),
    "a header with two pools": lambda lines: lines[0].update(num_pages=[8, 8]),
    "a header without settings": lambda lines: lines[0].update(build={}, model=None),
    "a header of another model": lambda lines: lines[0].update(model=5),
}


@pytest.mark.parametrize("change", BREAKS)
def test_a_broken_trace_is_refused_by_name_and_never_replayed(trace, tiny_engine, tmp_path, change):
    shown = replayed(rewritten(trace, tmp_path / "t.jsonl", BREAKS[change]), tiny_engine)
    assert isinstance(shown.exception, UserError), shown.output
    summary = replayed(tmp_path / "t.jsonl", "--summary").exception
    assert summary is None or isinstance(summary, UserError)


@pytest.mark.parametrize("text", ["[" * 100000, '{"camshaft_trace":1,' + '"a":[' * 100000])
def test_a_trace_of_brackets_is_refused(trace, tmp_path, text):
    for content in (text + "\n", trace.read_text().splitlines()[0] + "\n" + text + "\n"):
        (tmp_path / "t.jsonl").write_text(content)
        with pytest.raises(UserError, match="trace"):
            read_trace(tmp_path / "t.jsonl")


def test_a_trace_without_outcomes_is_not_equal(trace, tmp_path):
    for kept in (1, 2):
        shown = replayed(rewritten(trace, tmp_path / "t.jsonl", lambda lines, kept=kept: lines.__delitem__(
            slice(kept, None))))
        assert (shown.exit_code, "Nothing to compare" in shown.output) == (1, True), shown.output


def test_another_engine_or_other_settings_are_refused_by_name(trace, tiny_llama, tmp_path):
    from camshaft.testing.tiny import write_tiny_llama

    wrong = replayed(trace, write_tiny_llama(tmp_path / "other", seed=8))
    assert isinstance(wrong.exception, UserError)
    assert "the model the trace was recorded on" in str(wrong.exception)
    assert replayed(trace, tiny_llama).exit_code == 0, "the checkpoint is built with the recorded settings"
    lines = trace.read_text().splitlines(keepends=True)
    header = json.loads(lines[0])
    header["build"]["max_num_tokens"] = 256
    (tmp_path / "t.jsonl").write_text("".join([json.dumps(header) + "\n", *lines[1:]]))
    assert "max_num_tokens" in str(replayed(tmp_path / "t.jsonl").exception)


def test_a_summary_runs_nothing(trace, monkeypatch):
    monkeypatch.setattr("camshaft.runtime.model_engine.ModelEngine", None)
    found = json.loads(replayed(trace, "--summary", "--json").stdout)["summary"]
    steps = read_trace(trace).steps
    assert found["num_requests"] == sum(len(step.plan.arrivals) for step in steps) == 6
    assert found["num_generated_tokens"] == 3 * (9 + 6)
    assert found["largest_rows"] == 3
    assert "rows a step" in replayed(trace, "--summary").stdout
    assert isinstance(replayed(trace, "some/model", "--summary").exception, UserError)


@pytest.mark.parametrize("num_bytes", [1, 40])
def test_a_line_that_was_cut_off_is_left_out(trace, tmp_path, num_bytes):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(trace.read_bytes()[:-num_bytes])
    found, whole = read_trace(cut), read_trace(trace)
    assert found.is_cut
    assert (len(found.steps), found.steps[-1].output) == (len(whole.steps), None)
    shown = replayed(cut)
    assert (shown.exit_code, "1 steps have no recorded outcome" in shown.output) == (0, True)


@pytest.mark.parametrize("content", ["", "{", "{}\n", "[]\n", '{"camshaft_trace": 99, "camshaft": "9.0"}\n',
                                     '{"camshaft_trace": 1}\n', "text\n"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(UserError, match="trace"):
        read_trace(tmp_path / "t.jsonl")


def test_a_damaged_line_is_named(trace, tmp_path):
    lines = trace.read_text().splitlines(keepends=True)
    lines[3] = lines[3].replace("int32", "int33")
    (tmp_path / "t.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match="line 4"):
        read_trace(tmp_path / "t.jsonl")


def test_a_trace_replaces_a_trace_and_nothing_else(tiny_engine, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for place in (tmp_path / "notes.txt", tmp_path, tmp_path / "no" / "folder.jsonl"):
        with pytest.raises(UserError, match="trace"):
            LLM(tiny_engine, kv_cache=KV, trace=place)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    path = tmp_path / "t.jsonl"
    for count in (2, 3):
        record(tiny_engine, path, SamplingParams(max_tokens=count, ignore_eos=True))
        assert summarise(read_trace(path).steps).num_generated_tokens == 3 * count
    assert path.stat().st_mode & 0o077 == 0, "prompts are for their owner alone"


def test_a_processor_is_refused_and_the_engine_goes_on(tiny_engine, tmp_path):
    with LLM(tiny_engine, kv_cache=KV, trace=tmp_path / "t.jsonl") as llm:
        with pytest.raises(UserError, match="logits_processor"):
            llm.generate("a", SamplingParams(max_tokens=2, logits_processor=lambda ids, logits: logits))
        assert llm.generate("a", SamplingParams(max_tokens=2)).finished


def test_run_records_too(tiny_engine, tmp_path):
    path = tmp_path / "t.jsonl"
    shown = CliRunner().invoke(app, ["run", str(tiny_engine), "-p", "a valve", "--max-tokens", "3", "--ignore-eos",
                                     "--kv-max-bytes", str(2**22), "--trace", str(path)])
    assert shown.exit_code == 0, shown.output
    assert replayed(path).exit_code == 0


HEADER = TraceHeader(camshaft="0", torch="0", model=None, revision=None, weights_id="", build={}, device={},
                     num_pages=(1,), num_threads=1, kv_cache={}, scheduler={})
NOTHING = np.zeros(0, np.int32)


def plan(step):
    return StepPlan(step=step, arrivals=(), page_updates=(), rows=NOTHING, epochs=NOTHING, num_generation=0,
                    query_lens=NOTHING, start_positions=NOTHING, context_token_ids=NOTHING,
                    samples=np.zeros(0, np.bool_), output_indices=NOTHING)


class Runner:
    """Fails at step 2, when its result is read."""

    def submit(self, plan):
        self.step = plan.step
        handle = Runner()
        handle.step = plan.step
        return handle

    def result(self):
        if self.step == 2:
            raise RuntimeError("no memory")
        return StepOutput(step=self.step, rows=NOTHING, epochs=NOTHING, token_ids=NOTHING,
                          finite=np.zeros(0, np.bool_))


def test_steps_under_way_at_once_and_a_failure_are_recorded_in_their_order(tmp_path):
    writer = TraceWriter(tmp_path / "t.jsonl", HEADER)
    runner = RecordingRunner(Runner(), writer)
    first = runner.submit(plan(1))
    second = runner.submit(plan(2))
    first.result()
    third = runner.submit(plan(3))
    with pytest.raises(RuntimeError):
        second.result()
    assert third is not None
    writer.close()
    steps = read_trace(tmp_path / "t.jsonl").steps
    assert [(step.plan.step, step.failure, step.output is None) for step in steps] == [
        (1, None, False), (2, "RuntimeError: no memory", True), (3, None, True)]
    report = replay(steps, Runner())
    assert (report.first, report.num_without_outcome) == (None, 1)


def test_a_disk_that_refuses_ends_the_trace_and_not_the_engine(tmp_path, caplog):
    writer = TraceWriter(tmp_path / "t.jsonl", HEADER)
    writer._file.close()
    writer._file = open("/dev/full", "w")  # noqa: SIM115 - the writer closes it
    runner = RecordingRunner(Runner(), writer)
    for step in (1, 3):
        assert runner.submit(plan(step)).result().step == step
    assert sum("ends here" in record.message for record in caplog.records) == 1
    writer.close()
