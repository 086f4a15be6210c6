"""Messages: the tokens of a chat template, and those of them that count in the loss."""

import json

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokenizers is no dependency")
pytest.importorskip("jinja2")

import tokenizers

from parallel_ops.tokenization import Options
from parallel_ops.tokenization.chat import Chat
from parallel_ops.tokenization.messages import Conversation
from parallel_ops.tokenization.run import tokenize
from parallel_ops.train.data.tokens import TokenStream
from support.runs.tokenization import END, MESSAGES, tokenizer_file, tokenizer_folder, write_json_lines


def tokenized(tmp_path, tokenizer, conversations, **options):
    """Tokens and what counts of each conversation."""
    file = write_json_lines(tmp_path / "chat.jsonl", conversations, "messages")
    output = tmp_path / "chat.bin"
    found = tokenize([file], output, Options(tokenizer, key="messages", chat=True, **options))
    stream, mask = TokenStream([output]), np.fromfile(tmp_path / "chat.mask", np.uint8)
    tokens = [stream.document(number) for number in range(stream.documents)]
    assert found.loss_tokens == mask.sum() < found.tokens == len(mask)
    return list(zip(tokens, np.split(mask, np.cumsum(stream.lengths)[:-1]), strict=True))


def counted(tokenizer, tokens, mask):
    """The texts of the runs of tokens that count."""
    own = tokenizers.Tokenizer.from_file(str(tokenizer))
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
    return [own.decode(tokens[first:last].tolist(), skip_special_tokens=False) for first, last in edges]


def test_answers_count_and_prompts_do_not(tmp_path):
    folder = tokenizer_folder(tmp_path / "model")
    (tokens, mask), (_, other) = tokenized(tmp_path, folder, [MESSAGES, MESSAGES[:3]])
    answers = counted(folder / "tokenizer.json", tokens, mask)
    assert answers == ["384,400 km, on average.<|im_end|>\n", f"About 150 million km.<|im_end|>\n{END}"]
    assert other[-1] == 0  # after a question no end is learned
    assert tokens[-1] == 0


def test_the_tokens_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_folder(tmp_path / "model")
    ((tokens, mask),) = tokenized(tmp_path, folder, [MESSAGES])
    own = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokens[:-1].tolist() == own.apply_chat_template(MESSAGES, tokenize=True, return_dict=True)["input_ids"]
    prompt = own.apply_chat_template(MESSAGES[:3], tokenize=True, return_dict=True, add_generation_prompt=True)
    begin = len(prompt["input_ids"])
    assert tokens[:begin].tolist() == prompt["input_ids"] and mask[begin - 1 : begin + 1].tolist() == [0, 1]


def test_roles_marked_without_a_template(tmp_path):
    tokenizer = tokenizer_file(tmp_path)
    ((tokens, mask),) = tokenized(tmp_path, tokenizer, [MESSAGES])
    own = tokenizers.Tokenizer.from_file(str(tokenizer))
    assert own.decode(tokens.tolist(), skip_special_tokens=False) == (
        f"<|user|>\nHow far is the moon?\n<|assistant|>\n384,400 km, on average.{END}\n"
        f"<|user|>\nAnd the sun?\n<|assistant|>\nAbout 150 million km.{END}\n"
    )
    assert counted(tokenizer, tokens, mask)[0] == f"384,400 km, on average.{END}\n"


def test_plain_marks_and_templates_by_name(tmp_path):
    named = [
        {"name": "tools", "template": "x"},
        {"name": "default", "template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
    ]
    folder = tokenizer_folder(tmp_path / "model", chat_template=named)
    answer = [{"role": "assistant", "content": " moon"}]
    ((tokens, mask),) = tokenized(tmp_path, folder, [[{"role": "user", "content": "is"}, *answer], answer])[:1]
    assert counted(folder / "tokenizer.json", tokens, mask) == [f" moon{END}"] and mask[0] == 0
    for path in tmp_path.glob("chat.*"):
        path.unlink()
    (folder / "chat_template.jinja").write_text("{% generation %}no{% endgeneration %}")
    ((tokens, _),) = tokenized(tmp_path, folder, [MESSAGES], template="plain")
    assert len(tokens) > 20
    options = Options(folder / "tokenizer.json", key="messages", chat=True, template="tokenizer")
    with pytest.raises(ValueError, match=r"--template: .* has no chat template; plain marks the roles"):
        tokenize([tmp_path / "chat.jsonl"], tmp_path / "b.bin", options)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "the chat template is no template of Jinja"),
        ("{{ raise_exception('system first') }}", "the chat template refuses the messages: system first"),
        ("{{ messages[9].content.x }}", "the chat template refuses the messages"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "renders message 2 otherwise where others follow",
        ),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template refuses the messages"),
    ],
)
def test_a_template_that_does_not_fit(template, message):
    with pytest.raises(ValueError, match=message):
        Chat(template, {}, END).render(Conversation(MESSAGES, [1] * len(MESSAGES), None, lambda: "here"))


def test_a_file_with_a_template_that_refuses_is_one_line(tmp_path, capsys):
    folder = tokenizer_folder(tmp_path / "model", chat_template="{{ raise_exception('no') }}")
    file = write_json_lines(tmp_path / "a.jsonl", [MESSAGES], "messages")
    with pytest.raises(ValueError, match="refuses the messages: no"):
        tokenize([file], tmp_path / "a.bin", Options(folder, key="messages", chat=True))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3, "eos_token": END}))
    with pytest.raises(ValueError, match="must be text"):
        tokenize([file], tmp_path / "a.bin", Options(folder, key="messages", chat=True))
