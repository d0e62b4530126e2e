"""Chat templates: what they see, what they print, and the words when something is wrong."""

import json
import re
import time

import pytest

from camshaft.api.chat_template import ChatTemplate
from camshaft.api.tokenizer import Tokenizer
from camshaft.core.errors import UserError
from camshaft.frontend.gguf import GgufCheckpoint
from camshaft.testing.tiny import tiny_tokenizer

HI = [{"role": "user", "content": "Hi"}]
PLAIN = ("{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
         "{% if add_generation_prompt %}[assistant]{% endif %}")


def render(source, messages=HI, **options):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def files_with(template, backend=None, **config):
    backend = backend or tiny_tokenizer(300)
    config |= {} if template is None else {"chat_template": template}
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def test_messages_special_tokens_and_generation_prompt():
    assert render(PLAIN) == "<s>[user]Hi[assistant]"
    assert render(PLAIN, add_generation_prompt=False) == "<s>[user]Hi"


def test_the_default_models_template(smollm2_gguf):
    template = ChatTemplate.from_files(GgufCheckpoint(smollm2_gguf).tokenizer_files())
    assert template.render([{"role": "system", "content": "Be brief."}, *HI]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert template.render(HI).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_b25_a_template_that_prints_bos_gets_no_second_one():
    backend = tiny_tokenizer(300)
    backend.add_special_tokens(["<s>"])
    files = files_with(PLAIN, backend, bos_token="<s>", add_bos_token=True)
    tokenizer, template = Tokenizer.from_files(files), ChatTemplate.from_files(files)
    ids = tokenizer.encode(template.render(HI), add_special_tokens=False)
    assert [token == tokenizer.bos_token_id for token in ids[:2]] == [True, False]
    assert tokenizer.encode(template.render(HI))[:2] == [tokenizer.bos_token_id] * 2, "the test would see a second one"


def test_blocks_leave_no_blank_lines():
    source = "{% for message in messages %}\n    {% if true %}\n{{ message.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "Hi\n"


def test_tojson_is_plain_json():
    value = {"a": "<b>'&é", "n": [1, 2]}
    assert render("{{ value | tojson }}", value=value) == '{"a": "<b>\'&é", "n": [1, 2]}'
    assert render("{{ value | tojson(indent=2) }}", value={"a": 1}) == '{\n  "a": 1\n}'


def test_tools_and_further_variables_reach_the_template():
    tools = [{"type": "function", "function": {"name": "now"}}]
    source = "{{ tools[0].function.name }} {{ enable_thinking }}"
    assert render(source, tools=tools, enable_thinking=False) == "now False"
    assert render("{% if tools is none %}none{% endif %}") == "none"


def test_the_generation_tag_prints_its_body():
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


def test_loop_controls_and_the_clock():
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert render("{{ strftime_now('%Y') }}") in {str(time.localtime().tm_year), str(time.localtime().tm_year - 1)}


def test_what_the_template_refuses_is_told():
    with pytest.raises(UserError, match="Roles must alternate"):
        render("{{ raise_exception('Roles must alternate') }}")


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}",
                                    "{{ messages | tojson(indent=nope) }}", "{{ messages[0]['content'].foo() }}"])
def test_failures_inside_a_template_are_user_errors(source):
    with pytest.raises(UserError, match="chat template can render"):
        render(source)


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}",
    "{{ cycler.__init__.__globals__ }}"])
def test_the_sandbox_holds(source):
    with pytest.raises(UserError, match="chat template can render"):
        render(source)
    assert HI == [{"role": "user", "content": "Hi"}]


def test_a_template_that_does_not_compile():
    with pytest.raises(UserError, match=r"chat_template=.*valid Jinja template.*line 1"):
        render("{% for %}")


def test_content_in_parts_becomes_one_text():
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert render(PLAIN, messages) == "<s>[user]one\ntwo[assistant]"


def test_an_assistant_message_may_hold_only_tool_calls():
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "now"}}]}]
    assert render("{{ messages[0].tool_calls[0].function.name }}", messages) == "now"


@pytest.mark.parametrize(("messages", "field"), [
    ("Hi", "messages='Hi'"),
    ({"role": "user", "content": "Hi"}, "messages={"),
    ([], r"messages=\[\]: expected at least one"),
    (["Hi"], r"messages[0]='Hi'"),
    ([*HI, {"content": "x"}], "messages[1].role=None"),
    ([{"role": 3, "content": "x"}], "messages[0].role=3"),
    ([{"role": "user"}], "messages[0].content=None"),
    ([{"role": "user", "content": 5}], "messages[0].content=5"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]="),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text=1"),
])
def test_wrong_messages_are_named_by_index_and_field(messages, field):
    with pytest.raises(UserError, match=field if "\\" in field else re.escape(field)):
        render(PLAIN, messages)


def test_wrong_tools_are_named():
    with pytest.raises(UserError, match=r"tools\[0\]='now'"):
        render(PLAIN, tools=["now"])


def test_a_list_of_templates_gives_the_default_one():
    template = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": PLAIN}]
    assert ChatTemplate.from_files(files_with(template, bos_token="<s>")).render(HI) == "<s>[user]Hi[assistant]"


@pytest.mark.parametrize("template", [None, "", [{"name": "rag", "template": "R"}]])
def test_no_template(template):
    with pytest.raises(UserError, match=r"this model has none.*generate\(\)"):
        ChatTemplate.from_files(files_with(template))


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops in a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "endless text": "{% set x = 'x' * 1000000 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "own budget": "{% set __camshaft_budget = 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
                  "{% endfor %}",
    "other objects": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "other globals": "{{ raise_exception.__globals__.keys() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "changing its input": "{{ messages.append(1) }}",
    "file": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_come_to_an_end_and_reach_nothing(source, monkeypatch):
    monkeypatch.setattr("camshaft.api.chat_template._MAX_STEPS", 10_000)
    monkeypatch.setattr("camshaft.api.chat_template._MAX_CHARACTERS", 10_000_000)
    with pytest.raises(UserError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_counting_leaves_loops_as_they_are():
    source = ("{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ m.content }}"
              "{{ '' if loop.last else ',' }}{% else %}none{% endfor %}"
              "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.previtem }}{% endfor %}"
              "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
              "{% for a in range(9) %}{% if a == 2 %}{% break %}{% endif %}{{ a }}{% endfor %}"
              "{% for a in nothing %}{% else %}!{% endfor %}")
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    assert ChatTemplate(source, {}).render(messages) == "1/2u,2/2ua112301!"
