"""GenerationResult: hand-over between threads and event loops."""

import asyncio
import threading

import pytest

from camshaft.api.outputs import CompletionOutput, RequestOutput
from camshaft.api.result import GenerationResult
from camshaft.core.errors import InternalError


def make(aborted=None):
    output = RequestOutput(request_id=1, prompt="p", prompt_token_ids=[1], outputs=[CompletionOutput(index=0)])
    log = [] if aborted is None else aborted
    return GenerationResult(output, lambda: log.append(1))


def add(result, text, token, *, finished=False):
    def change(output):
        output.outputs[0].text += text
        output.outputs[0].token_ids.append(token)
        output.finished = finished

    result.update(change)


def test_a_slow_reader_finds_the_news_merged():
    result = make()
    add(result, "a", 1)
    reader = iter(result)
    assert next(reader).outputs[0].text_diff == "a"
    add(result, "b", 2)
    add(result, "c", 3, finished=True)
    last = next(reader).outputs[0]
    assert (last.text, last.text_diff, last.token_ids_diff) == ("abc", "bc", [2, 3])
    assert list(reader) == []


def test_log_probabilities_are_cut_with_their_tokens():
    result = make()

    def change(output):
        output.outputs[0].token_ids += [1, 2]
        output.outputs[0].logprobs = (output.outputs[0].logprobs or []) + ["one", "two"]

    result.update(change)
    reader = iter(result)
    assert next(reader).outputs[0].logprobs_diff == ["one", "two"]
    result.update(change)
    second = next(reader).outputs[0]
    assert (second.token_ids_diff, second.logprobs_diff) == ([1, 2], ["one", "two"])
    assert second.logprobs == ["one", "two"] * 2
    second.logprobs.clear()
    assert len(result.snapshot().outputs[0].logprobs) == 4, "a reader's copy is its own"


def test_a_quiet_change_wakes_nobody_and_is_found_with_the_next():
    result = make()

    async def main():
        reader = result.__aiter__()
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        result.update(lambda output: output.outputs[0].token_ids.append(1), quiet=True)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        add(result, "b", 2, finished=True)
        return (await waiting).outputs[0].token_ids_diff

    assert asyncio.run(main()) == [1, 2]


def test_each_reader_has_its_own_place():
    result = make()
    add(result, "a", 1)
    add(result, "b", 2, finished=True)
    assert [o.outputs[0].text_diff for o in result] == ["ab"]
    assert [o.outputs[0].text_diff for o in result] == ["ab"]


def test_leaving_an_iteration_early_aborts():
    aborted = []
    result = make(aborted)
    add(result, "a", 1)
    for _ in result:
        break
    assert aborted == [1]


def test_an_error_is_raised_to_every_waiter():
    result = make()
    result.fail(InternalError("boom"))
    with pytest.raises(InternalError, match="boom"):
        result.result(timeout=1)
    with pytest.raises(InternalError, match="boom"):
        list(result)
    assert result.snapshot().outputs[0].finish_reason == "error"


def test_a_timeout_leaves_the_request_running():
    aborted = []
    result = make(aborted)
    with pytest.raises(TimeoutError, match="not finished"):
        result.result(timeout=0.01)
    assert aborted == []


def test_an_event_loop_is_woken_from_another_thread():
    result = make()

    async def main():
        collected = []
        threading.Timer(0.02, lambda: add(result, "x", 1)).start()
        threading.Timer(0.04, lambda: add(result, "y", 2, finished=True)).start()
        async for output in result:
            collected.append(output.outputs[0].text_diff)
        return "".join(collected)

    assert asyncio.run(main()) == "xy"


def test_a_closed_loop_does_not_disturb_the_front():
    result = make()

    async def start():
        iterator = result.__aiter__()
        task = asyncio.ensure_future(iterator.__anext__())
        await asyncio.sleep(0)
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(start())
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    add(result, "a", 1, finished=True)
    assert result.result(timeout=1).outputs[0].text == "a"
