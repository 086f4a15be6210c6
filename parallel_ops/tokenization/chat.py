"""Messages to text, and the characters of it that count in the loss: what the assistant says.

An answer's span is what its message adds behind the prompt that asks for it. With ``render`` for the chat template,
``render(messages[:i], add_generation_prompt=True)`` is the prompt, and ``render(messages[:i + 1])`` ends with the
answer and its end. So the model is trained on what it continues at inference. Templates need a message for a prompt:
that of a first message is what comes before all it says, as a system message of the template. Where the template puts
no special token at the end of an answer, that of the next role ends it, as in GLM-4, and is learned with it.

Templates are rendered as in Hugging Face's transformers: by Jinja in its sandbox, which runs no code of a template.
"""

import json
import os
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NoReturn

from parallel_ops.tokenization.messages import Conversation, with_parsed_arguments

# The roles marked, the end of a document behind each answer.
PLAIN = (
    "{{ '<|tools|>\n' + tools | tojson + '\n' if tools else '' }}"
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' }}{{ (call.function or call) | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}"
    "{{ (end if message.role == 'assistant' else '') + '\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '' }}"
)
# Keys of messages with something that the model says or sees, which a template may pass over.
_SAID = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal", "audio", "documents")
# Put into a message to find out whether the template has it in its output.
_MARK = "\ufdd0"


class Chat:
    """A chat template.

    Args:
        template: Of Jinja; ``None`` for ``PLAIN``. tokens: Names and texts of special tokens.
        end: Text of the token that ends a document. special: Texts of special tokens.

    Raises:
        ValueError: It is no template. ImportError: Jinja is not installed.
    """

    def __init__(self, template: str | None, tokens: dict[str, str], end: str, special: Collection[str]) -> None:
        try:
            import jinja2
            from jinja2 import nodes, sandbox
        except ImportError:
            raise ImportError("--chat needs jinja2; run: pip install jinja2") from None
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()],
            finalize=_printed,
        )  # fmt: skip
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _refuse
        # No strftime_now: templates then have a date of their own, and a run on another day has the same tokens.
        self._tokens = {**tokens, "end": end}
        self._special = tuple(special)
        source = PLAIN if template is None else template
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is no template of Jinja: {error}") from None
        # Everything that the template names: variables, attributes, keys.
        self._names = {node.name for node in tree.find_all(nodes.Name)}
        self._names |= {node.attr for node in tree.find_all(nodes.Getattr)}
        self._names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}

    def render(self, given: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages, and begin and end of each answer in it that counts in the loss.

        Raises:
            ValueError: The template refuses the messages, leaves something out, or changes earlier ones when others
            follow.
        """
        messages = with_parsed_arguments(given.messages)
        try:
            text = self._rendered(messages, given)
        except ValueError:
            # Some templates want the arguments of tool calls as text.
            if messages == given.messages:
                raise
            messages = given.messages
            text = self._rendered(messages, given)
        self._check_whole(messages, given, text)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not given.weights[number]:
                continue
            after = self._rendered(messages[: number + 1], given)
            before = self._rendered(messages[:number], given, prompt=True) if number else self._opening(given, after)
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"the chat template renders message {number + 1} otherwise where others follow, so its tokens are "
                    "not known; --template plain marks the roles, a weight of 0 leaves an answer out of the loss"
                )
            following = messages[number + 1 : number + 2]
            ended = not following or following[0]["role"] == "assistant"
            mark = "" if ended else self._mark(after[len(before) :], text[len(after) :])
            spans.append((len(before), len(after) + len(mark)))
        return text, spans

    def _mark(self, answer: str, rest: str) -> str:
        """The special token that ends an answer, if the template has it with the next message."""
        if answer.rstrip().endswith(self._special):
            return ""
        return max((name for name in self._special if rest.startswith(name)), key=len, default="")

    def _opening(self, given: Conversation, text: str) -> str:
        """What of the text of a first message comes before anything that it says; nothing if that is not known."""
        try:
            other = self._rendered([{"role": given.messages[0]["role"], "content": _MARK}], given)
        except ValueError:
            return ""
        return os.path.commonprefix([text, other]) if _MARK in other else ""  # noqa: RUF071 (of characters)

    def _check_whole(self, messages: list[dict[str, Any]], given: Conversation, text: str) -> None:
        """ValueError: The text is the same without the tools, a message, or a key of one."""
        if given.tools and "tools" not in self._names and self._rendered(messages, replace(given, tools=None)) == text:
            raise ValueError("the chat template leaves out 'tools'; --ignore tools accepts it")
        for number, message in enumerate(messages):
            for name in _SAID:
                if message.get(name) and name not in self._names:
                    without = {key: value for key, value in message.items() if key != name}
                    if self._same([*messages[:number], without, *messages[number + 1 :]], given, text):
                        raise ValueError(
                            f"the chat template leaves out {name!r} of message {number + 1}; --ignore {name} accepts it"
                        )
            content = (message["content"] or "").strip()
            if content and content not in text:
                marked = {**message, "content": content + _MARK}
                if self._same([*messages[:number], marked, *messages[number + 1 :]], given, text):
                    raise ValueError(f"the chat template leaves out message {number + 1}, of role {message['role']!r}")

    def _same(self, messages: list[dict[str, Any]], given: Conversation, text: str) -> bool:
        try:
            return self._rendered(messages, given) == text
        except ValueError:
            return False

    def _rendered(self, messages: list[dict[str, Any]], given: Conversation, *, prompt: bool = False) -> str:
        import jinja2

        try:
            return self._template.render(
                messages=messages, add_generation_prompt=prompt, tools=given.tools, **self._tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None


def _printed(value: Any) -> Any:
    """The printed form of a value: nothing for null, which Python would name; never Python's form of a list."""
    if isinstance(value, (list, dict)):
        raise ValueError(f"it prints a value that is no text: {value!r:.80}")
    return "" if value is None else value


def _json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _generation() -> Any:
    """The block ``{% generation %}``, which some templates mark answers with; its content is as without it."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation
