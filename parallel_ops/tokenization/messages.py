"""Rows to documents: texts, or messages in the forms of OpenAI and Hugging Face.

A key that would change what is learnt is used, or refused by name unless it is in ``Options.ignore``.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from parallel_ops.tokenization.options import Options

# Keys of rows that change what counts in the loss or what the model sees; ``tools`` is used with messages.
ROW_KEYS = (
    "labels", "attention_mask", "loss_mask", "completion_mask", "assistant_masks", "loss_weight", "weight", "tools",
    "functions", "chat_template_kwargs",
)  # fmt: skip
# Keys of messages that change what counts; ``weight`` is used.
_LOSS_KEYS = ("labels", "loss", "loss_mask", "loss_weight", "mask", "train", "trainable", "training")
_CALLS = "tool_calls"


@dataclass(frozen=True)
class Conversation:
    """Messages of one document.

    Attributes:
        messages: With ``role`` and ``content``, which is text or ``None``, and what else the input has.
        weights: 0 for answers that do not count in the loss, otherwise 1.
        tools: Descriptions of tools; ``None`` for none. place: Returns the place in the input, for messages of errors.
    """

    messages: list[dict[str, Any]]
    weights: list[int]
    tools: list[Any] | None
    place: Callable[[], str]


def value_of(row: dict[str, Any], options: Options, place: Callable[[], str]) -> str | Conversation:
    """The document of a row; an empty text for null.

    Raises:
        ValueError: The key is missing or has another type, or another key would change what is learnt.
    """
    key = options.key
    if key not in row:
        has = ", ".join(map(repr, row))
        raise ValueError(f"{place()} has no key {key!r}; it has {has}; --key names the one with the document")
    for name in ROW_KEYS:
        if name != key and name not in options.ignore and row.get(name) not in (None, [], {}, ""):
            if name == "tools" and options.chat:
                continue
            raise ValueError(
                f"{place()} has {name!r}, which changes what is learnt and is not used here; --ignore {name} leaves it "
                "out"
            )
    value = mended(row[key])
    if value is None:
        return ""
    if options.chat:
        tools = None if "tools" in options.ignore or key == "tools" else mended(row.get("tools"))
        return conversation(value, tools, options, place)
    if not isinstance(value, str):
        hint = "; --chat reads messages" if isinstance(value, list) else ""
        raise ValueError(f"{place()}: {key!r} must be text, got {type(value).__name__}{hint}")
    return value


def conversation(value: Any, tools: Any, options: Options, place: Callable[[], str]) -> Conversation:
    """Messages in one form: content is text or ``None``, and keys that are null are left out.

    Raises:
        ValueError: They are not a list of messages, or have something that cannot be used; names ``place``.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place()} must have a list of messages, got {value!r:.80}")
    messages, weights = [], []
    for given in value:
        if not isinstance(given, dict) or not isinstance(given.get("role"), str):
            raise ValueError(f"{place()}: a message needs 'role' and 'content', got {given!r:.80}")
        message = {name: own for name, own in given.items() if own is not None and name not in options.ignore}
        for name in _LOSS_KEYS:
            if name in message:
                raise ValueError(
                    f"{place()}: a message has {name!r}, which is not used here; 'weight' of 0 or 1 says whether an "
                    f"answer counts, --ignore {name} leaves it out"
                )
        weight = message.pop("weight", 1)
        if weight not in (0, 1) or isinstance(weight, str):
            raise ValueError(f"{place()}: the weight of a message must be 0 or 1, got {weight!r}")
        weights.append(int(weight))
        if message.get("content") is None and not set(message) - {"role"}:
            raise ValueError(f"{place()}: a message needs 'role' and 'content', got {given!r:.80}")
        message["content"] = _content(message.get("content"), place)
        if not isinstance(calls := message.get(_CALLS, []), list) or not all(isinstance(c, dict) for c in calls):
            raise ValueError(f"{place()}: {_CALLS!r} must be a list of objects, got {calls!r:.80}")
        messages.append(message)
    return Conversation(messages, weights, _tools(tools, place), place)


def with_parsed_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose tool calls have objects as arguments, as templates expect; OpenAI's form has JSON in a text."""
    return [
        {**message, _CALLS: [_parsed(call) for call in message[_CALLS]]} if message.get(_CALLS) else message
        for message in messages
    ]


def mended(value: Any) -> Any:
    """``value`` with U+FFFD for halves of surrogate pairs, which JSON can have and UTF-8 cannot."""
    if isinstance(value, dict):
        return {mended(key): mended(own) for key, own in value.items()}
    if isinstance(value, list):
        return [mended(own) for own in value]
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def replaced(given: Conversation, texts: dict[str, str]) -> Conversation:
    """A conversation with other texts for some in its messages and tools, longer ones first; itself if it has none.

    Raises:
        ValueError: It has some, and one of the other texts already.
    """
    written = {json.dumps(text, ensure_ascii=False)[1:-1]: other for text, other in texts.items()}
    content = json.dumps([given.messages, given.tools], ensure_ascii=False)
    found = re.sub("|".join(map(re.escape, written)), lambda match: written[match[0]], content)
    if found == content:
        return given
    if taken := re.search("|".join(texts.values()), content):
        raise ValueError(f"the character U+{ord(taken[0]):X} of private use is taken; --split-special-tokens")
    messages, tools = json.loads(found)
    return replace(given, messages=messages, tools=tools)


def _content(value: Any, place: Callable[[], str]) -> str | None:
    """The content of a message. Parts that are texts, which OpenAI's form may have, are put together."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{place()}: the content of a message must be text, got {type(value).__name__}")
    texts = []
    for part in value:
        own = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(own, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"{place()}: the content of a message has a part of type {kind!r}; only text is read")
        texts.append(own)
    return "".join(texts)


def _tools(value: Any, place: Callable[[], str]) -> list[Any] | None:
    """The tools of a row: a list, or JSON of one, as columns have it whose rows differ in their keys."""
    if value in (None, "", []):
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place()}: 'tools' is not JSON: {error}") from None
    if not isinstance(value, list):
        raise ValueError(f"{place()}: 'tools' must be a list, got {type(value).__name__}")
    return value or None


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(given := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):  # what a model wrote need not be JSON
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
