"""Messages to text, and the characters of it that count in the loss: what the assistant says.

An answer's span is what its message adds behind the prompt that asks for it. With ``render`` for the chat template,
``render(messages[:i], add_generation_prompt=True)`` is the prompt, and ``render(messages[:i + 1])`` ends with the
answer and its end. So the model is trained on what it continues at inference.

Templates are rendered as in Hugging Face's transformers: by Jinja in its sandbox, which runs no code of a template.
"""

import json
from typing import Any, NoReturn

# The roles marked, the end of a document behind each answer.
PLAIN = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content }}"
    "{{ (end if message.role == 'assistant' else '') + '\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '' }}"
)


class Chat:
    """A chat template.

    Args:
        template: Of Jinja; ``None`` for ``PLAIN``. tokens: Names and texts of special tokens.
        end: Text of the token that ends a document.

    Raises:
        ValueError: It is no template. ImportError: Jinja is not installed.
    """

    def __init__(self, template: str | None, tokens: dict[str, str], end: str) -> None:
        try:
            import jinja2
            from jinja2 import sandbox
        except ImportError:
            raise ImportError("--chat needs jinja2; run: pip install jinja2") from None
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
        )
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _refuse
        # No strftime_now: templates then have a date of their own, and a run on another day has the same tokens.
        self._tokens = {**tokens, "end": end}
        try:
            self._template = environment.from_string(PLAIN if template is None else template)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is no template of Jinja: {error}") from None

    def render(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages, and begin and end of each answer in it.

        Raises:
            ValueError: The template refuses the messages, or changes earlier ones when others follow.
        """
        text = self._rendered(messages, prompt=False)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(messages[:number], prompt=True) if number else ""
            after = self._rendered(messages[: number + 1], prompt=False)
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"the chat template renders message {number + 1} otherwise where others follow, so its tokens are "
                    "not known; --template plain marks the roles"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _rendered(self, messages: list[dict[str, Any]], *, prompt: bool) -> str:
        import jinja2

        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, tools=None, **self._tokens)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None


def _json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


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
