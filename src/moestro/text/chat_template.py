"""Chat templates: jinja2 in a sandbox, rendering what transformers' chat templates render.

Templates come with checkpoints and are not trusted: they run in jinja2's immutable sandbox and see
plain data only. The helpers are those templates are written against: ``raise_exception``,
``strftime_now``, ``tojson``, ``namespace``, ``{% break %}``, ``{% generation %}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moestro.core.errors import CheckpointError, InvalidRequest

#: names under which clients send a message's reasoning; templates read the first, a few the second
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: what evaluating a template on data it was not written for can raise, besides jinja2's own errors
_EVALUATION_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ToolArguments(dict[str, Any]):
    """Arguments of a tool call: a mapping to templates that walk it, JSON text to those that
    concatenate it. Clients send the text and most templates want the mapping.
    """

    def __init__(self, values: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(values)
        self._text = json.dumps(values, ensure_ascii=False) if text is None else text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + self._text if isinstance(other, str) else NotImplemented


class ChatTemplate:
    """The template or templates of one checkpoint.

    ``sources`` by name: ``default`` is the usual one, ``tool_use`` is taken when there are tools.
    ``special_tokens`` (``bos_token`` and so on) are variables of the template. ``origin`` says in
    errors where the template is from.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "the checkpoint",
    ) -> None:
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens or {})
        self.origin = origin
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        name: str | None = None,
        **extra: Any,
    ) -> str:
        """The prompt text of a conversation.

        ``tools`` are OpenAI tool definitions. ``extra`` become variables (``documents``,
        ``enable_thinking``, ...). ``name`` picks one of several templates.

        Raises InvalidRequest with the template's own words where it refuses the conversation, and
        CheckpointError for a template that does not parse.
        """
        template = self._template(name or self._pick(bool(tools)))
        variables = {**self.special_tokens, "documents": None, **_plain(extra)}
        try:
            return template.render(
                messages=_messages(messages),
                tools=_tools(tools),
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses this: {error.message}") from error
        except _EVALUATION_ERRORS as error:
            raise InvalidRequest(
                f"the chat template of {self.origin} cannot render these messages "
                f"({type(error).__name__}: {error}); check roles and content against its format"
            ) from error

    def _pick(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.sources:
            return "tool_use"
        if "default" not in self.sources and len(self.sources) == 1:
            return next(iter(self.sources))
        return "default"

    def _template(self, name: str) -> jinja2.Template:
        if name not in self.sources:
            raise InvalidRequest(
                f"{self.origin} has no chat template {name!r}; choose one of: "
                + ", ".join(sorted(self.sources))
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self.sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(
                    f"chat template {name!r} of {self.origin} does not parse: line {error.lineno}: "
                    f"{error.message}; fix it there"
                ) from error
        return self._compiled[name]

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals["namespace"] = _Namespace
        environment.globals["dict"] = _make_dict
        return environment


class _Generation(Extension):
    """``{% generation %}``: marks what the assistant wrote, for training; here only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        # A scope of its own, as the call block has that transformers makes of it.
        scope = jinja2.nodes.Scope()
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [scope]


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` without underscore names, which would reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_namespace_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_namespace_name(name)
        super().__setitem__(name, value)


def _check_namespace_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"namespace attribute {name!r} begins with an underscore; rename it in the template"
        )


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as ``json.dumps`` writes it; jinja2's own filter would escape ``<``, ``>`` and ``&``."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{index}] must be a mapping with a 'role' that is text")
    # Protocols send keys with null for what is not there; templates ask whether the key exists.
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _tool_call(call: Any) -> Any:
    """The call with its arguments as a mapping; arguments that are no JSON object stay text."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, dict):
        return {**call, "arguments": ToolArguments(arguments)}
    if not isinstance(arguments, str):
        return call
    try:
        values = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return call
    if not isinstance(values, dict):
        return call
    return {**call, "arguments": ToolArguments(values, arguments or "{}")}


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequest("tools must be a list of tool definitions")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequest(f"tools[{index}] must be a mapping (a JSON schema of the tool)")
    return [_plain(tool) for tool in tools]


_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)


def _plain(value: Any) -> Any:
    """A copy made of JSON's types alone, so that a template meets no methods of other objects."""
    if value is None or isinstance(value, bool):
        return value
    for base, convert in _BASES:
        if isinstance(value, base):
            return convert(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise InvalidRequest(
        f"a {type(value).__name__} cannot be given to a chat template; use text, numbers, lists "
        "and mappings"
    )
