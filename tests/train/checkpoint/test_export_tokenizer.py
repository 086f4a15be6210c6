"""What an exported folder says about text: the tokenizer, where generation ends, the dtype of weights."""

import json

import pytest
import torch

pytest.importorskip("safetensors")


from parallel_ops.train.checkpoint.export import export
from support.runs import trainer as runs
from support.runs.tensor_files import tensors_in

END = "<|endoftext|>"


def small_tokenizer(folder):
    """A tokenizer that has no more tokens than the model, with settings."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is no dependency")
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role + message.content + eos_token }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_dtype_and_tokenizer(llama, tmp_path):
    tokenizer = small_tokenizer(tmp_path / "tokenizer")
    assert export(llama, tmp_path / "a", tokenizer=tokenizer)["dtype"] == "bf16"  # of the run
    export(llama, tmp_path / "b", dtype="fp32", tokenizer=tokenizer / "tokenizer.json")
    a, b = tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b")
    assert {t.dtype for t in a.values()} == {torch.bfloat16} and {t.dtype for t in b.values()} == {torch.float32}
    assert all(torch.equal(t, b[name].bfloat16()) for name, t in a.items())
    names = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in "ab"]
    more = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert names == [more, more]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_ids_of_the_folder_that_was_tuned_stay(data, llama, tmp_path):
    export(llama, tmp_path / "first", dtype="fp32")
    config = tmp_path / "first" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": 7}))
    settings = runs.settings_of(
        data, model={"dir": str(tmp_path / "first")}, checkpoint={"dir": str(tmp_path / "tuned")}
    )
    runs.steps_of(0, settings, steps=1)
    export(tmp_path / "tuned", tmp_path / "second")
    assert json.loads((tmp_path / "second" / "config.json").read_text())["eos_token_id"] == 7


@pytest.mark.parametrize("settings", [True, False])
def test_generation_ends_where_documents_do(llama, tmp_path, settings):
    """With the settings of a tokenizer, and for a tokenizer.json alone as ``tokenize`` takes it."""
    transformers = pytest.importorskip("transformers")
    source = small_tokenizer(tmp_path / "tokenizer")
    if not settings:
        (source / "tokenizer_config.json").unlink()
    export(llama, tmp_path / "a", tokenizer=source if settings else source / "tokenizer.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a").float()
    want = tokenizer.convert_tokens_to_ids(END)
    assert tokenizer.eos_token == END
    assert model.config.eos_token_id == model.generation_config.eos_token_id == want
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenize=False
    )
    assert END in text
    if not settings:
        assert text == f"<|user|>\na\n<|assistant|>\nb{END}\n"
    model.lm_head.weight.data.zero_()
    model.lm_head.bias = torch.nn.Parameter(
        torch.nn.functional.one_hot(torch.tensor(want), len(model.lm_head.weight)) * 1.0
    )
    assert model.generate(torch.zeros(1, 2, dtype=torch.long), max_new_tokens=8).shape[1] == 3


def test_a_tokenizer_with_more_tokens_than_the_model(llama, tmp_path):
    source = small_tokenizer(tmp_path / "tokenizer")
    whole = json.loads((source / "tokenizer.json").read_text())
    whole["added_tokens"].append({**whole["added_tokens"][-1], "id": 4096, "content": "<more>"})
    (source / "tokenizer.json").write_text(json.dumps(whole))
    for given in (source, source / "tokenizer.json"):
        with pytest.raises(ValueError, match=r"--tokenizer: .* has 4097 tokens, and the model has a vocabulary of \d+"):
            export(llama, tmp_path / "a", tokenizer=given)
    assert not (tmp_path / "a").exists()


def test_settings_of_generation_that_are_there_stay(llama, tmp_path):
    source = small_tokenizer(tmp_path / "tokenizer")
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.5}')
    export(llama, tmp_path / "a", tokenizer=source)
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
