"""Tokenizers and texts of the tests of ``tokenize``."""

import json
import random
from pathlib import Path
from typing import Any

END = "<|endoftext|>"
# As Qwen's: a system message, marks around each turn.
CHAT_TEMPLATE = """{%- if messages[0]['role'] != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MESSAGES = [
    {"role": "user", "content": "How far is the moon?"},
    {"role": "assistant", "content": "384,400 km, on average."},
    {"role": "user", "content": "And the sun?"},
    {"role": "assistant", "content": "About 150 million km."},
]


def text_of(seed: int, words: int) -> str:
    """Lines of words, empty lines and indented ones among them."""
    draw = random.Random(seed)
    found = []
    for _ in range(words):
        found.append(draw.choice(["the", "moon", "is", "Erde", "größer", "384,400", "never", "x = y"]))
        found.append(draw.choice([" "] * 8 + ["\n", "\n", "\n\n", "\n  "]))
    return "".join(found)


def tokenizer_file(folder: Path) -> Path:
    """A byte-level BPE as GPT-2's, of 293 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [END, "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([text_of(seed, 300) for seed in range(5)], trainer)
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def tokenizer_folder(folder: Path, **settings: Any) -> Path:
    """The same as a Hugging Face folder with a chat template."""
    folder.mkdir()
    tokenizer_file(folder)
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": CHAT_TEMPLATE} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


def write_json_lines(path: Path, values: list[Any], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: value, "n": 1}) + "\n" for value in values))
    return path


def expected(tokenizer: Path, texts: list[str]) -> list[list[int]]:
    """The tokens of each text that is not empty."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(tokenizer))
    return [[*own.encode(text).ids, own.token_to_id(END)] for text in texts if text]


def read(path: Path) -> list[list[int]]:
    """The documents of a token file."""
    from parallel_ops.train.data.tokens import TokenStream

    stream = TokenStream([path])
    return [stream.document(number).tolist() for number in range(stream.documents)]


def bytes_of(output: Path) -> list[bytes]:
    return [output.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]


TEXTS = [text_of(seed, 40 * seed) for seed in range(12)]  # the first is empty
