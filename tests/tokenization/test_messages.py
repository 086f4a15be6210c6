"""Messages: the tokens of a chat template, those of them that count, and the forms that people have messages in."""

import json

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="tokenizers is no dependency")
pytest.importorskip("jinja2")

import tokenizers

from parallel_ops.tokenization import Options
from parallel_ops.tokenization.run import tokenize
from parallel_ops.train.data.tokens import TokenStream
from support.runs.tokenization import CHAT_TEMPLATE, END, MESSAGES, tokenizer_folder

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)
USER = {"role": "user", "content": "q"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ö"}'}}


@pytest.fixture
def chat(tmp_path):
    """Tokenizes rows by a template; returns the text of the documents and of what counts in them."""
    calls = []

    def call(*rows, template=CHATML, end="<|im_end|>", choice="auto", **options):
        calls.append(0)
        folder = tokenizer_folder(tmp_path / f"model{len(calls)}", chat_template=template, eos_token=end)
        file, output = tmp_path / "chat.jsonl", tmp_path / f"{len(calls)}.bin"
        file.write_text("".join(json.dumps(row if isinstance(row, dict) else {"messages": row}) + "\n" for row in rows))
        options = Options(folder, key="messages", chat=True, template=choice, **options)
        summary = tokenize([file], output, options, processes=1)
        own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        stream = TokenStream([output])
        found, counted = [], 0
        for number in range(stream.documents):
            tokens = stream.document(number)
            counts = stream.counted(number, 0, len(tokens))
            counted += counts.sum()
            found.append([own.decode(part.tolist(), skip_special_tokens=False) for part in (tokens, tokens[counts])])
        assert (summary.tokens, summary.loss_tokens) == (len(stream), counted)
        return found

    return call


class TestTemplates:
    def test_answers_count_and_prompts_do_not(self, chat):
        (_, counted), (text, other) = chat(MESSAGES, MESSAGES[:3], template=CHAT_TEMPLATE, end=END)
        assert counted == f"384,400 km, on average.<|im_end|>\nAbout 150 million km.<|im_end|>\n{END}"
        assert text.endswith(END) and other == "384,400 km, on average.<|im_end|>\n"  # a question's end is not learned

    @pytest.mark.parametrize("choice", ["auto", "plain"])
    def test_what_comes_before_an_answer_that_is_first_does_not_count(self, chat, choice):
        """A system message of the template, and the mark of the role."""
        first = [{"role": "assistant", "content": "You ask?"}, *MESSAGES[:1]]
        ((text, counted),) = chat(first, template=CHAT_TEMPLATE, choice=choice)
        assert text.startswith("<|im_start|>system\nYou help." if choice == "auto" else "<|assistant|>\nYou")
        assert counted == "You ask?<|im_end|>\n"
        thinks = "{% for m in messages %}{{ m.role + ':' + (m.thinking or '') + m.content + '<|im_end|>' }}{% endfor %}"
        assert chat([first[0] | {"thinking": "Hm."}], template=thinks)[0][1] == "Hm.You ask?<|im_end|>"
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
        only = "{% for m in messages %}{{ m.role + m.tool_calls[0].function.name + '<|im_end|>' }}{% endfor %}"
        assert chat([call], template=only)[0][1] == "assistantf<|im_end|>"

    @pytest.mark.parametrize("split", [False, True])
    def test_an_answer_that_the_mark_of_the_next_role_ends_is_learned_with_it(self, chat, split):
        """As in GLM-4, which stops at that mark; another answer behind it is no reason to stop."""
        marks = "{{ ('<|im_end|>' if m.role == 'assistant' else '<|im_start|>') + m.content }}{% endfor %}"
        template = "{% for m in messages %}" + marks + "{{ '<|im_end|>' if add_generation_prompt }}"
        messages = [USER, {"role": "assistant", "content": "a"}, USER, *[{"role": "assistant", "content": "b"}] * 2]
        ((text, counted),) = chat(messages, template=template, end=END, split_special_tokens=split)
        assert text == f"<|im_start|>q<|im_end|>a<|im_start|>q<|im_end|>b<|im_end|>b{END}"
        assert counted == f"a<|im_start|>bb{END}"
        messages[1] = {**messages[1], "weight": 0}
        assert chat(messages, template=template, end=END, split_special_tokens=split)[0][1] == f"bb{END}"

    def test_the_tokens_are_those_of_transformers(self, chat, tmp_path):
        transformers = pytest.importorskip("transformers")
        chat(MESSAGES, template=CHAT_TEMPLATE, end=END)
        tokens, mask = np.fromfile(tmp_path / "1.bin", np.uint16), np.fromfile(tmp_path / "1.mask", np.uint8)
        own = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model1")
        assert tokens[:-1].tolist() == own.apply_chat_template(MESSAGES, tokenize=True, return_dict=True)["input_ids"]
        prompt = own.apply_chat_template(MESSAGES[:3], tokenize=True, return_dict=True, add_generation_prompt=True)
        begin = len(prompt["input_ids"])
        assert tokens[:begin].tolist() == prompt["input_ids"] and mask[begin - 1 : begin + 1].tolist() == [0, 1]

    @pytest.mark.parametrize("choice", [{"template": None}, {"choice": "plain"}])
    def test_roles_marked_without_a_template(self, chat, choice):
        ((text, counted),) = chat(MESSAGES, end=END, **choice)
        assert text == (
            f"<|user|>\nHow far is the moon?\n<|assistant|>\n384,400 km, on average.{END}\n"
            f"<|user|>\nAnd the sun?\n<|assistant|>\nAbout 150 million km.{END}\n"
        )
        assert counted == f"384,400 km, on average.{END}\nAbout 150 million km.{END}\n"

    def test_templates_by_name(self, chat):
        default = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        named = [{"name": "tools", "template": "x"}, {"name": "default", "template": default}]
        messages = [USER, {"role": "assistant", "content": " moon"}]
        assert chat(messages, template=named, end=END) == [[f"q moon{END}", f" moon{END}"]]

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            (None, "--template: .* has no chat template; plain marks the roles"),
            (3, "must be text"),
            ("{% for", "the chat template is no template of Jinja"),
            ("{{ messages[9].content.x }}", "the chat template refuses the messages"),
            ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "the chat template refuses the messages"),
        ],
    )
    def test_what_is_no_template(self, chat, template, message):
        with pytest.raises(ValueError, match=message):
            chat(MESSAGES, template=template, choice="tokenizer")


class TestForms:
    @pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
    @pytest.mark.parametrize("arguments", ['{"x": "ö"}', {"x": "ö"}])
    def test_tool_calls(self, chat, content, arguments):
        made = {**CALL, "function": {"name": "f", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "tool_calls": [made], **content}, {"role": "tool", "content": "3"}]
        ((text, counted),) = chat(messages)
        assert text == (
            '<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{"x": "ö"}<|im_end|>\n'
            "<|im_start|>tool\n3<|im_end|>\n"
        )
        assert counted == '{"x": "ö"}<|im_end|>\n'
        ((text, counted),) = chat(messages, template=None, end=END)
        assert text == (
            f'<|user|>\nq\n<|assistant|>\n<tool_call>{{"name": "f", "arguments": {{"x": "ö"}}}}</tool_call>{END}\n'
            f"<|tool|>\n3\n{END}"
        )
        assert counted.endswith(f"</tool_call>{END}\n")

    def test_arguments_as_text_where_the_template_wants_it(self, chat):
        template = CHATML.replace("call.function.arguments | tojson", "'(' + call.function.arguments + ')'")
        ((text, _),) = chat([USER, {"role": "assistant", "tool_calls": [CALL]}], template=template)
        assert '({"x": "ö"})' in text

    def test_content_in_parts_and_surrogates(self, chat):
        parts = [{"type": "text", "text": "a \ud83d"}, {"type": "text", "text": "b"}]
        ((text, _),) = chat([{"role": "user", "content": parts}])
        assert text == "<|im_start|>user\na \ufffdb<|im_end|>\n"

    def test_tools(self, chat):
        tools = [{"type": "function", "function": {"name": "f"}}]
        template = "{{ tools | tojson if tools else '' }}" + CHATML
        for given in (tools, json.dumps(tools)):
            ((text, _),) = chat({"messages": [USER], "tools": given}, template=template)
            assert text.startswith('[{"type": "function", "function": {"name": "f"}}]<|im_start|>')
        for empty in (None, [], ""):
            chat({"messages": [USER], "tools": empty})
        with pytest.raises(ValueError, match=r"line 1: the chat template leaves out 'tools'; --ignore tools"):
            chat({"messages": [USER], "tools": tools})
        assert chat({"messages": [USER], "tools": tools}, ignore=("tools",))[0][0].startswith("<|im_start|>user")
        assert chat({"messages": [USER], "tools": tools}, template=None)[0][0].startswith("<|tools|>\n[{")

    def test_weights(self, chat):
        answers = [{"role": "assistant", "content": text, "weight": n} for n, text in enumerate("ab")]
        assert [counted for _, counted in chat([USER, *answers])] == ["b<|im_end|>\n"]
        assert [counted for _, counted in chat([USER, *answers[::-1]], end=END)] == ["b<|im_end|>\n"]

    def test_a_column_has_all_keys_in_each_row(self, chat, tmp_path):
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is no dependency")
        from pyarrow import parquet

        rows = [[USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{}"}}]}]]
        parquet.write_table(pyarrow.table({"messages": rows, "tools": [None]}), tmp_path / "a.parquet")
        template = "{% for m in messages %}{{ m.role }}{{ ':calls' if 'tool_calls' in m }}{{ m.content }}{% endfor %}"
        folder = tokenizer_folder(tmp_path / "model", chat_template=template)
        options = Options(folder, key="messages", chat=True)
        tokenize([tmp_path / "a.parquet"], tmp_path / "a.bin", options, processes=1)
        own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = np.fromfile(tmp_path / "a.bin", np.uint16).tolist()
        assert own.decode(tokens, skip_special_tokens=False) == f"userqassistant:calls{END}"


REFUSED = {
    "image": ([{"role": "user", "content": [{"type": "image_url"}]}], "has a part of type 'image_url'"),
    "number": ([{"role": "user", "content": 3}], "the content of a message must be text, got int"),
    "nothing": ([{"role": "user", "content": None}], "a message needs 'role' and 'content'"),
    "calls": ([{"role": "assistant", "tool_calls": "f()"}], "'tool_calls' must be a list of objects"),
    "loss": ([{**USER, "train": False}], "a message has 'train', which is not used here"),
    "weight": ([{**USER, "weight": 0.5}], "the weight of a message must be 0 or 1, got 0.5"),
    "thoughts": (
        [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}],
        "leaves out 'reasoning_content' of message 2; --ignore reasoning_content",
    ),
    "refusal": ([USER, {"role": "assistant", "refusal": "no"}], "leaves out 'refusal' of message 2"),
    "functions": ({"messages": [USER], "functions": [{"name": "f"}]}, "has 'functions', which changes what is learnt"),
}


class TestRefused:
    @pytest.mark.parametrize("what", REFUSED)
    def test_with_file_and_line(self, chat, what):
        row, message = REFUSED[what]
        with pytest.raises(ValueError, match=r"chat\.jsonl line 2") as found:
            chat([USER], row)
        assert message in str(found.value)

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[0].content }}",
             "the chat template refuses the messages: no system"),
            ("{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
             "the chat template leaves out message 1, of role 'system'"),
            ("{% for m in messages %}{{ m.content if m.role == 'user' else m }}{% endfor %}",
             "it prints a value that is no text"),
            ("{% for m in messages %}{{ 'last:' if loop.last }}{{ m.content }}{% endfor %}",
             "renders message 2 otherwise where others follow"),
        ],
    )  # fmt: skip
    def test_a_template_that_does_not_fit(self, chat, template, message):
        messages = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}, USER]
        with pytest.raises(ValueError, match=r"chat\.jsonl line 2: ") as found:
            chat([USER], messages, template=template)
        assert message in str(found.value)


class TestEnds:
    def test_a_document_never_ends_twice(self, chat):
        messages = [USER, {"role": "assistant", "content": "a"}]
        ended = CHATML + "{{ '" + END + " \n' if not add_generation_prompt }}"
        for template, end in ((CHATML, "<|im_end|>"), (None, END), (ended, END)):
            ((text, counted),) = chat(messages, template=template, end=end)
            assert text.count(end) == (2 if end == "<|im_end|>" else 1) and text.rstrip().endswith(end)
            assert counted.startswith("a")
        ((text, _),) = chat(messages, end=END)
        assert text.endswith(f"<|im_end|>\n{END}")

    def test_names_of_special_tokens_in_messages(self, chat, tmp_path):
        messages = [
            {"role": "user", "content": f"what is {END} and <|im_start|>ö?"},
            {"role": "assistant", "content": "<|im_end|>"},
        ]
        (tokens, _), (split, counted) = *chat(messages, template=CHAT_TEMPLATE), *chat(
            messages, template=CHAT_TEMPLATE, split_special_tokens=True
        )  # fmt: skip
        assert tokens == split and counted == "<|im_end|><|im_end|>\n"
        all_ids, ids = (np.fromfile(tmp_path / f"{number}.bin", np.uint16).tolist() for number in (1, 2))
        own = tokenizers.Tokenizer.from_file(str(tmp_path / "model1" / "tokenizer.json"))
        assert all_ids == own.encode(tokens, add_special_tokens=False).ids
        # A system turn, the user's and the assistant's are of the template.
        assert [token for token in ids if token < 3] == [1, 2, 1, 2, 1, 2]

    def test_without_names_both_ways_are_the_same(self, chat, tmp_path):
        messages = [{"role": "user", "content": " größer\n\n <x> "}, {"role": "assistant", "content": " a b "}]
        assert chat(messages) == chat(messages, split_special_tokens=True)
        assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()
        assert (tmp_path / "1.mask").read_bytes() == (tmp_path / "2.mask").read_bytes()
