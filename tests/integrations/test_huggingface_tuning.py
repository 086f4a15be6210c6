"""Three steps of TRL's trainers and of peft's adapters with ``huggingface.apply`` are those of stock."""

import pytest
import torch
import transformers
from packaging.version import Version

from parallel_ops.integrations import huggingface
from support.integrations.huggingface import LENGTH, VOCAB
from support.integrations.huggingface_families import HYBRIDS, model_of

pytest.importorskip("accelerate")
TRIED = ("gemma4", "qwen3_5", "gpt_oss", "deepseek_v3", "minimax", "llama4")
FAMILIES = ["llama", *(name for name in TRIED if name in HYBRIDS)]
TOLERANCE = {"gemma4": 1e-4}


def options(folder, **more):
    return {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "gradient_checkpointing": False, "bf16": False, **more,
    }  # fmt: skip


def tokens_of(rows, columns=LENGTH):
    return torch.randint(3, VOCAB, (rows, columns), generator=torch.Generator().manual_seed(1)).tolist()


def losses_of(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compare(family, adapt, trainer_of):
    """The losses of three steps of a stock model and of one with the ops, and what the handle of the latter says."""
    expected = losses_of(trainer_of(adapt(model_of(family))))
    model = adapt(model_of(family))
    handle = huggingface.apply(model)
    got = losses_of(trainer_of(model))
    assert len(got) == 3 and got[0] != got[2]
    assert got == pytest.approx(expected, rel=TOLERANCE.get(family, 1e-5))
    return handle


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_peft(family, tmp_path):
    """On all linears, and on the gates and ups of stacked experts."""
    peft = pytest.importorskip("peft", reason="peft is no dependency")

    def adapt(model):
        torch.manual_seed(2)
        stacked = [name for name, p in model.named_parameters() if p.dim() == 3 and name.endswith("gate_up_proj")]
        config = peft.LoraConfig(
            r=4, target_modules="all-linear", target_parameters=stacked or None, init_lora_weights=False,
            exclude_modules=".*router",  # Llama 4's is a linear, with another result
        )  # fmt: skip
        return peft.get_peft_model(model, config)

    rows = [{"input_ids": row, "labels": row} for row in tokens_of(6)]
    compare(
        family, adapt,
        lambda model: transformers.Trainer(
            model, transformers.TrainingArguments(**options(tmp_path)), train_dataset=rows
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def trl():
    if Version(transformers.__version__) < Version("4.56.2"):
        pytest.skip("TRL asks for Transformers 4.56.2")
    return pytest.importorskip("trl", reason="trl is no dependency")


def text(row):
    return " ".join(f"w{token}" for token in row)


# TRL's loss does not find the base model of Llama 4.
@pytest.mark.parametrize("family", [name for name in FAMILIES[::2] if name != "llama4"])
def test_supervised_tuning_by_trl(trl, family, tmp_path, tokenizer):
    """TRL puts a forward with a loss of its own over the model's; the ops of its layers run."""
    datasets = pytest.importorskip("datasets", reason="datasets, with pyarrow, is no dependency")
    rows = datasets.Dataset.from_list([{"prompt": text(row[:5]), "completion": text(row[5:])} for row in tokens_of(6)])
    handle = compare(
        family, lambda model: model,
        lambda model: trl.SFTTrainer(
            model, trl.SFTConfig(**options(tmp_path, max_length=LENGTH)), train_dataset=rows,
            processing_class=tokenizer,
        ),
    )  # fmt: skip
    assert "unused: 1 x vocab_parallel_linear_cross_entropy: it was not called" in repr(handle)
    assert "rms_norm" not in repr(handle).partition("unused")[2]


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_preferences_and_rewards_by_trl(trl, kind, tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets", reason="datasets, with pyarrow, is no dependency")
    given = tokens_of(12)
    if kind == "dpo":
        rows = [
            {"prompt": text(a[:5]), "chosen": text(a[5:]), "rejected": text(b[5:])}
            for a, b in zip(given[:6], given[6:], strict=True)
        ]
        trainer, config = trl.DPOTrainer, trl.DPOConfig(**options(tmp_path, max_length=LENGTH))
        more = {"ref_model": model_of("llama")}
    else:
        rows = [{"prompt": text(row[:5])} for row in given]
        config = trl.GRPOConfig(**options(tmp_path, max_completion_length=6, num_generations=2))
        more = {"reward_funcs": lambda completions, **_: [float(len(set(c.split()))) for c in completions]}
        trainer = trl.GRPOTrainer
    rows = datasets.Dataset.from_list(rows)

    def trainer_of(model):
        torch.manual_seed(3)
        return trainer(model, args=config, train_dataset=rows, processing_class=tokenizer, **more)

    compare("llama", lambda model: model, trainer_of)
