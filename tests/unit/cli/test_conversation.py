"""A chat's logic on a model that echoes: turns, commands, overflow, Ctrl-C. No terminal, no engine."""

import dataclasses
import json
import types

import pytest

from camshaft.cli.chat import PlainScreen, TerminalScreen, _message, talk
from camshaft.cli.conversation import COMMANDS, Conversation
from camshaft.cli.settings import FIXED_IN_A_CHAT, refuse_fixed, settable
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import RequestTooLargeError, UserError


@dataclasses.dataclass
class Recorder:
    """A screen that remembers."""

    text: str = ""
    notes: list = dataclasses.field(default_factory=list)
    tables: list = dataclasses.field(default_factory=list)

    def answer(self, text):
        self.text += text or "\n"

    def note(self, text):
        self.notes.append(text)

    def table(self, rows):
        self.tables.append(dict(rows))


class Echo:
    """Answers each conversation with the last question in capitals; a token a character."""

    def __init__(self, max_seq_len=1000):
        self.description = {"build": {"max_seq_len": max_seq_len}}
        self.heard, self.params, self.stop_after, self.largest = [], [], None, 10**9

    def apply_chat_template(self, messages):
        if any("\N{BELL}" in message["content"] for message in messages):
            raise UserError("messages", "bell", "a conversation without bells")
        self.heard.append([(message["role"], message["content"]) for message in messages])
        return [0] * sum(len(message["content"]) for message in messages)

    def generate_async(self, ids, params):
        if len(ids) > self.largest:
            raise RequestTooLargeError("prompt", len(ids), f"at most {self.largest}")
        self.params.append(params)
        return self.stream(len(ids), self.heard[-1][-1][1].upper())

    def stream(self, num_prompt, text):
        for index, piece in enumerate(text):
            if index == self.stop_after:
                raise KeyboardInterrupt
            completion = types.SimpleNamespace(text_diff=piece, token_ids=[0] * (index + 1), finish_reason="stop")
            yield types.SimpleNamespace(outputs=[completion], prompt_token_ids=[0] * num_prompt, num_cached_tokens=3)

    def get_stats(self):
        return {"num_running": 0, "kv": {"num_free": 7}}


@pytest.fixture
def chat():
    return Conversation(Echo(), Recorder(), {"max_tokens": 10})


def said(chat):
    return [(turn.question, turn.answer) for turn in chat.turns]


def test_every_turn_goes_along_with_its_answer(chat):
    assert chat.handle("one\n")
    assert chat.handle("two")
    assert said(chat) == [("one", "ONE"), ("two", "TWO")]
    assert chat.model.heard[-1] == [("user", "one"), ("assistant", "ONE"), ("user", "two")]
    assert chat.screen.text == "ONE\nTWO\n"
    assert "3 of them cached" in chat.screen.notes[-1]


def test_nothing_is_asked_of_an_empty_line_and_two_slashes_are_one(chat):
    chat.handle("   ")
    chat.handle("//help me")
    assert said(chat) == [("/help me", "/HELP ME")]


def test_the_system_text_comes_first_and_can_be_taken_away(chat):
    chat.handle("/system Be brief.")
    chat.handle("hi")
    chat.handle("/system")
    chat.handle("ho")
    assert chat.model.heard[0][0] == ("system", "Be brief.")
    assert chat.model.heard[1][0] == ("user", "hi")


def test_undo_retry_clear(chat):
    chat.handle("one")
    chat.handle("two")
    chat.handle("/undo")
    assert said(chat) == [("one", "ONE")]
    chat.handle("/retry")
    assert said(chat) == [("one", "ONE")]
    assert chat.model.heard[-1] == [("user", "one")]
    chat.handle("/clear")
    assert said(chat) == []
    chat.handle("/undo")
    assert (chat.num_failed, "at least one turn" in chat.screen.notes[-1]) == (1, True)


def test_an_unknown_command_is_answered_with_the_nearest(chat):
    chat.handle("/cleer")
    assert "Did you mean '/clear'?" in chat.screen.notes[-1]
    assert said(chat) == []


@pytest.mark.parametrize(("line", "words"), [
    ("/save ~nobody-of-that-name/x", "a user who exists"), ("/load ~nobody-of-that-name/x", "a user who exists"),
    ("/save a\0b", "NUL"), ("/load a\0b", "NUL"),
    ("/save", "FILE"), ("/undo now", "nothing after it"), ("/load /no/such/file", "No such file"),
    ("/set temperature", "NAME=VALUE"), ("/set temperatur=1", "temperature"), ("/set temperature=hot", "a number"),
    ("/set max_tokens=0", "max_tokens"), ("/set n=2", "an option of a chat"),
    ("/set ignore_eos=maybe", "true or false"),
    ("/set stop='a", "NAME=VALUE")])
def test_a_wrong_command_changes_nothing(chat, line, words):
    chat.handle(line)
    assert words in chat.screen.notes[-1]
    assert (chat.settings, chat.num_failed) == ({"max_tokens": 10}, 1)


def test_a_file_of_brackets_or_half_characters_ends_no_chat(chat, tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100000)
    chat.handle(f"/load {tmp_path}/deep.json")
    assert "a JSON file" in chat.screen.notes[-1]
    (tmp_path / "half.json").write_text(
        r'[{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a"}]')
    chat.handle(f"/load {tmp_path}/half.json")
    assert "UTF-8" in chat.screen.notes[-1]
    assert (said(chat), chat.num_failed) == ([], 2)


def test_settings_reach_the_model_and_can_be_given_back(chat):
    chat.handle("/set temperature=0.5 max_tokens=7 ignore_eos=yes stop='the end'")
    chat.handle("hi")
    assert chat.model.params[-1] == SamplingParams(temperature=0.5, max_tokens=7, ignore_eos=True, stop="the end")
    chat.handle("/set temperature=none")
    assert chat.screen.tables[-1] == {"max_tokens": "7", "ignore_eos": "True", "stop": "the end"}


def test_what_a_chat_cannot_show_is_neither_settable_nor_accepted():
    assert not set(FIXED_IN_A_CHAT) & set(settable())
    for name, value in (("n", 2), ("best_of", 2), ("logprobs", 1), ("detokenize", False)):
        with pytest.raises(UserError, match=name):
            refuse_fixed({name: value})
    refuse_fixed({"n": 1, "max_tokens": 3})


def test_save_and_load_carry_the_conversation_over(chat, tmp_path):
    chat.handle("/system Be brief.")
    chat.handle("one")
    chat.handle(f"/save {tmp_path}/talk.json")
    assert json.loads((tmp_path / "talk.json").read_text())[0] == {"role": "system", "content": "Be brief."}
    other = Conversation(Echo(), Recorder(), {"max_tokens": 10})
    other.handle(f"/load {tmp_path}/talk.json")
    other.handle("two")
    assert other.model.heard[-1] == [("system", "Be brief."), ("user", "one"), ("assistant", "ONE"), ("user", "two")]


@pytest.mark.parametrize("content", ["{", "7", "[3]", '[{"role": "user", "content": "a"}]', '[{"role": "user"}]',
                                     '[{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]'])
def test_a_file_that_is_no_conversation_is_refused_and_nothing_is_lost(chat, tmp_path, content):
    chat.handle("one")
    (tmp_path / "talk.json").write_text(content)
    chat.handle(f"/load {tmp_path}/talk.json")
    assert "/load" in chat.screen.notes[-1]
    assert said(chat) == [("one", "ONE")]


def test_the_oldest_turns_give_way_visibly_and_are_still_saved():
    chat = Conversation(Echo(max_seq_len=100), Recorder(), {"max_tokens": 20})
    for question in ("a" * 20, "b" * 15, "c" * 20):
        chat.handle(question)
    assert chat.model.heard[-1] == [("user", "b" * 15), ("assistant", "B" * 15), ("user", "c" * 20)]
    assert any("The context is full: the oldest" in note for note in chat.screen.notes)
    assert (len(chat.turns), chat.num_forgotten) == (3, 1)
    chat.handle("/clear")
    assert chat.num_forgotten == 0


def test_turns_give_way_where_the_engine_has_less_room_than_its_context():
    chat = Conversation(Echo(), Recorder(), {"max_tokens": 10})
    chat.model.largest = 50
    chat.handle("a" * 20)
    chat.handle("b" * 20)
    assert (chat.num_forgotten, chat.model.heard[-1]) == (1, [("user", "b" * 20)])
    chat.handle("c" * 60)
    assert "at most 50" in chat.screen.notes[-1]
    assert (len(chat.turns), chat.num_forgotten) == (2, 1), "a message that never fits costs no turn"


def test_what_the_template_refuses_leaves_no_turn(chat):
    chat.handle("one")
    chat.handle("\N{BELL}")
    assert said(chat) == [("one", "ONE")]
    assert "without bells" in chat.screen.notes[-1]


def test_ctrl_c_keeps_what_was_said_and_drops_a_turn_without_an_answer(chat):
    chat.model.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        chat.handle("a long question")
    assert said(chat) == [("a long question", "A L")]
    assert chat.screen.notes[-1] == "Stopped."
    chat.model.stop_after = 0
    with pytest.raises(KeyboardInterrupt):
        chat.handle("another")
    with pytest.raises(KeyboardInterrupt):
        chat.handle("/retry")
    assert said(chat) == [("a long question", "A L")], "a retry that brings nothing keeps the old answer"


def test_help_lists_every_command_and_stats_are_flat(chat):
    chat.handle("/help")
    assert {command.usage for command in COMMANDS} <= set(chat.screen.tables[-1])
    chat.handle("/stats")
    assert chat.screen.tables[-1]["kv.num_free"] == "7"
    assert chat.handle("/quit") is False
    assert chat.handle("/exit") is False


class Keyboard(Recorder):
    """A screen whose lines are given; an exception in their place is raised."""

    def __init__(self, *lines):
        super().__init__()
        self.lines = list(lines)

    def ask(self, prompt):
        line = self.lines.pop(0)
        if isinstance(line, type):
            raise line
        return line


@pytest.mark.parametrize(("lines", "left"), [
    (["one", EOFError, "two"], 1), (["one", "/quit", "two"], 1),
    (["one", KeyboardInterrupt, "two", KeyboardInterrupt, KeyboardInterrupt, "three"], 1)])
def test_the_ways_out_of_a_terminal(lines, left):
    screen = Keyboard(*lines)
    chat = Conversation(Echo(), screen, {"max_tokens": 10})
    talk(chat, screen)
    assert len(screen.lines) == left
    assert len(chat.turns) == sum(isinstance(line, str) and line[0] != "/" for line in lines[:-left])


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves():
    screen = Keyboard("question", KeyboardInterrupt, "never read")
    chat = Conversation(Echo(), screen, {"max_tokens": 10})
    chat.model.stop_after = 2
    talk(chat, screen)
    assert said(chat) == [("question", "QU")]
    assert screen.lines == ["never read"]


def test_fences_hold_a_message_of_several_lines():
    assert _message(Keyboard('"""first', "second", 'third"""')) == "first\nsecond\nthird"
    assert _message(Keyboard("plain")) == "plain"


def test_a_models_control_characters_do_not_reach_the_terminal(capsys):
    screen = TerminalScreen()
    screen.answer("a\x1b]0;title\x07b\n\x9bc")
    screen.answer("")
    screen.note("\x1b[2J")
    out = capsys.readouterr().out
    assert out.startswith("a]0;titleb\nc\n")
    assert "\x1b" not in out


def test_without_a_terminal_answers_alone_go_to_standard_output(capsys):
    chat = Conversation(Echo(), PlainScreen(), {"max_tokens": 10})
    chat.handle("one")
    chat.handle("/help")
    chat.handle("two")
    assert capsys.readouterr().out == "ONE\nTWO\n"



def test_a_line_in_another_encoding_ends_no_chat(chat, monkeypatch):
    lines = iter([UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "hi", EOFError()])

    def ask(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(chat.screen, "ask", ask, raising=False)
    talk(chat, chat.screen)
    assert "HI" in chat.screen.text
    assert any("not text in utf-8" in note for note in chat.screen.notes)
