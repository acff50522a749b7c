"""Chat templates render as transformers renders them, and refuse in the template's own words."""

from __future__ import annotations

import enum
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.text import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = """{{ bos_token }}{% for m in messages %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant, but got ' + m.role) }}
    {% endif %}
    {% if m['role'] == 'user' %}
        {{- '[INST] ' + m['content'] | trim + ' [/INST]' }}
    {% else %}
        {{- ' ' + m['content'] + eos_token }}
    {% endif %}
{% endfor %}"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}"""
MACROS = """{%- macro show(value, depth=0) -%}
    {%- if value is mapping -%}
        {%- for key, item in value | dictsort -%}
            {{ '  ' * depth }}{{ key }}:{{ '\\n' if item is mapping else ' ' }}
            {{- show(item, depth + 1) }}
        {%- endfor -%}
    {%- elif value is iterable and value is not string -%}
        {{ value | join(', ') }}{{ '\\n' }}
    {%- else -%}
        {{ value }}{{ '\\n' }}
    {%- endif -%}
{%- endmacro -%}
{% for tool in tools or [] %}{{ show(tool) }}{% endfor %}
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}"""
NAMESPACE = """{%- set ns = namespace(last_user=-1, seen=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.last_user < 0 and message.role == 'user' %}
        {%- set ns.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 < ns.last_user and '</think>' in message.content %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '|' }}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
LOOP_CONTROLS = """{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}
{{ loop.index }}. {{ message.content }}
{% endfor %}
{%- generation %}answer {{ messages | length }}{% endgeneration %}"""
JSON = """{{ messages[0] | tojson }}
{{ messages[0] | tojson(indent=2) }}
{{ messages[0] | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}
{{ documents | tojson }} {{ {'<&>': "'é'"} | tojson }} {{ dict(a=1) | tojson }}"""
DATE = """Today: {{ strftime_now('%Y') }}
{%- for message in messages %}
{{ message['content'] if message['content'] is string else message['content'][0]['text'] }}
{%- endfor %}"""
REASONING = """{% for m in messages %}
{{- m.role }}:{{ m.reasoning_content | default('none') }}:{{ m.thinking | default('none') }};
{%- if m.content is none %}null{% endif %}{% if 'tool_calls' in m %}calls{% endif %}
{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "instruct": INSTRUCT,
    "tools": TOOLS,
    "macros": MACROS,
    "namespace": NAMESPACE,
    "loop controls": LOOP_CONTROLS,
    "json": JSON,
    "date": DATE,
    "reasoning": REASONING,
}

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "  What's <b>1+1</b> & why? é 🦙"}
ANSWER = {"role": "assistant", "content": "<think>\nhm</think>\n\n2"}
REASONED = {"role": "assistant", "content": "2", "reasoning": "one and one"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 1, "b": [1, {"c": "é"}], "d": None}},
        }
    ],
}
RESULT = {"role": "tool", "content": "2"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CONVERSATIONS = {
    "one": [USER],
    "several": [USER, ANSWER, USER],
    "system": [SYSTEM, USER, ANSWER, USER, ANSWER],
    "reasoning": [USER, REASONED, USER],
    "calls": [USER, CALL, RESULT],
}


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **options)
    return rendered[0]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": [WEATHER], "enable_thinking": False},
        {"add_generation_prompt": True, "documents": [{"title": "t", "text": "<é>"}]},
    ],
    ids=["plain", "tools", "documents"],
)
def test_rendering_is_that_of_transformers(name, conversation, options):
    source, messages = TEMPLATES[name], CONVERSATIONS[conversation]
    template = ChatTemplate({"default": source}, special_tokens=SPECIAL)
    if name == "instruct" and conversation in ("system", "calls"):
        with pytest.raises(InvalidRequest, match="Roles must alternate"):
            template.render(messages, **options)
        return
    assert template.render(messages, **options) == theirs(source, messages, **options)


def render(source: str, messages: list[Any] | None = None, **options: Any) -> str:
    return ChatTemplate({"default": source}).render(
        [USER] if messages is None else messages, **options
    )


# --- tool calls ---------------------------------------------------------------------------------

ARGUMENT_TEMPLATES = {
    "json": "{{ a | tojson }}",
    "items": "{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}",
    "filter": "{% for k, v in a | items %}{{ k }}={{ v }};{% endfor %}",
    "either": "{{ a if a is string else a | tojson }}",
    "text": "{{ '<' + a + '>' }}",
    "text before": "{{ a + '>' }}",
    "joined": "{{ '<' ~ a }}",
    "shown": "{{ a }}",
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name", ARGUMENT_TEMPLATES)
def test_arguments_suit_templates_of_either_kind(name, as_text, flat):
    arguments: Any = {"city": "Köln", "items": [1, 2], "text": "x"}
    text = json.dumps(arguments, ensure_ascii=False)
    wanted = {
        "json": text,
        "items": "city=Köln;items=[1, 2];text=x;",
        "filter": "city=Köln;items=[1, 2];text=x;",
        "either": text,
        "text": f"<{text}>",
        "text before": f"{text}>",
        "joined": f"<{text}",
        "shown": text,
    }
    call: dict[str, Any] = {"name": "f", "arguments": text if as_text else arguments}
    if not flat:
        call = {"id": "c1", "type": "function", "function": call}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    path = "messages[0].tool_calls[0]" + ("" if flat else ".function") + ".arguments"
    source = "{% set a = " + path + " %}" + ARGUMENT_TEMPLATES[name]
    assert render(source, [message]) == wanted[name]
    assert call.get("function", call)["arguments"] in (text, arguments)  # the caller's is unchanged


@pytest.mark.parametrize("arguments", ["", "  "])
def test_no_arguments_are_an_empty_mapping(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == "{}"


@pytest.mark.parametrize("arguments", ["{broken", "[1, 2]", "7", "null"])
def test_arguments_that_are_no_object_stay_text(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == arguments


def test_tool_calls_of_other_shapes_reach_the_template_as_they_are():
    for calls in ([], ["x"], [{"name": "f"}], [{"function": None, "arguments": 3}], "text"):
        message = {"role": "assistant", "tool_calls": calls}
        assert json.loads(render("{{ messages[0].tool_calls | tojson }}", [message])) == calls


# --- refusals -----------------------------------------------------------------------------------


def test_a_refusal_has_the_templates_words():
    with pytest.raises(InvalidRequest, match="only user, please"):
        render("{{ raise_exception('only user, please') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ messages[0]['content'].index('@') }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content | nofilter }}",
    ],
)
def test_a_template_that_breaks_is_an_error_of_ours(source):
    with pytest.raises((InvalidRequest, CheckpointError), match="template"):
        render(source)


def test_a_template_that_does_not_parse_names_the_line_and_the_checkpoint():
    template = ChatTemplate({"default": "a\n{% if %}"}, origin="/models/x")
    with pytest.raises(CheckpointError, match=r"/models/x does not parse: line 2"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ dict.__globals__['os'] }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages[0].tool_calls[0].function.arguments._text.x }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source):
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    with pytest.raises(InvalidRequest):
        render(source, [{"role": "user", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        {"role": "user"},
        [],
        ["hi"],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        5,
        None,
    ],
)
def test_messages_of_another_shape_are_refused(messages):
    template = ChatTemplate({"default": CHATML})
    with pytest.raises(InvalidRequest, match="messages"):
        template.render(messages)


@pytest.mark.parametrize("tools", ["x", {"type": "function"}, ["x"], 5])
def test_tools_of_another_shape_are_refused(tools):
    with pytest.raises(InvalidRequest, match="tools"):
        render(TOOLS, tools=tools)


def test_objects_with_methods_never_reach_a_template():
    with pytest.raises(InvalidRequest, match="set cannot be given"):
        render(CHATML, [{"role": "user", "content": {1, 2}}])

    class Role(str, enum.Enum):
        USER = "user"

    assert render("{{ messages[0].role }}", [{"role": Role.USER}]) == "user"


# --- several templates --------------------------------------------------------------------------


def test_tools_choose_the_template_for_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[]) == "plain"
    assert template.render([USER], tools=[WEATHER]) == "tools"
    assert template.render([USER], tools=[WEATHER], name="rag") == "rag"


def test_a_lone_template_needs_no_name():
    assert ChatTemplate({"rag": "rag"}).render([USER]) == "rag"


def test_an_unknown_template_lists_the_known():
    with pytest.raises(InvalidRequest, match=r"'x'.*a, b"):
        ChatTemplate({"a": "", "b": ""}).render([USER], name="x")
    with pytest.raises(InvalidRequest, match=r"'default'.*a, b"):
        ChatTemplate({"a": "", "b": ""}).render([USER])
