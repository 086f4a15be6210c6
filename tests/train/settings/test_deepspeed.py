"""Files of DeepSpeed: what of them is taken, and what cannot be."""

import json

import pytest

from parallel_ops.planner import Plan
from parallel_ops.train.config_file import settings_of
from parallel_ops.train.settings.deepspeed import with_deepspeed

SETTINGS = {
    "model": {"vocab_size": 64, "seq_length": 32, "num_layers": 2, "hidden_size": 32, "num_heads": 4},
    "data": {"paths": ["tokens.bin"]},
    "parallel": {"dp": 2, "tp": 2},
}
DEEPSPEED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "hysteresis": 2},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.99], "eps": 1e-9, "weight_decay": 0.05}},
    "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_num_steps": 10, "total_num_steps": 300, "warmup_type": "linear", "warmup_min_lr": 0,
        "warmup_max_lr": 2e-4}},
    "steps_per_print": 5,
    "wall_clock_breakdown": False,
}  # fmt: skip


def read(tmp_path, change=None):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**DEEPSPEED, **(change or {})}))
    with pytest.warns(UserWarning, match=r"without effect here: .*zero_optimization\.overlap_comm"):
        return settings_of(with_deepspeed(SETTINGS, path))


def test_what_it_says_is_done(tmp_path):
    settings = read(tmp_path)
    assert settings.plan == Plan(dp=2, tp=2, zero=2, micro_batch=2, global_batch=16, fused_loss=True)
    found = settings.optimizer
    assert (found.lr, found.betas, found.eps) == (2e-4, (0.9, 0.99), 1e-9)
    assert (found.weight_decay, found.grad_clip) == (0.05, 0.5)
    assert (found.schedule, found.warmup, found.min_lr_ratio, settings.run.steps) == ("linear", 10, 0.0, 300)
    assert settings.logging.interval == 5 and settings.precision.dtype == "bf16"


def test_auto_is_that_of_the_settings(tmp_path):
    """As the files that Hugging Face's Trainer completes have it."""
    path = tmp_path / "ds.json"
    auto = dict.fromkeys(("warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "total_num_steps"), "auto")
    own = {"optimizer": {"lr": 5e-4, "warmup": 7}, "precision": {"dtype": "fp16"}, "run": {"steps": 40}}
    content = {
        "fp16": {"enabled": "auto", "initial_scale_power": 12},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": auto | {"warmup_type": "linear"}},
        "tensor_parallel": {"autotp_size": 0},
        "train_batch_size": 8,
    }
    path.write_text(json.dumps(content))
    settings = settings_of(with_deepspeed({**SETTINGS, **own, "parallel": {"dp": 2}}, path))
    assert (settings.optimizer.lr, settings.optimizer.warmup, settings.run.steps) == (5e-4, 7, 40)
    assert settings.precision.initial_scale == 4096 and settings.plan.tp == 1
    content["scheduler"] = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "cos_min_ratio": "auto"}}
    path.write_text(json.dumps(content))
    own["optimizer"] = {"min_lr_ratio": 0.2}
    found = settings_of(with_deepspeed({**SETTINGS, **own, "parallel": {"dp": 2}}, path)).optimizer
    assert (found.schedule, found.warmup, found.min_lr_ratio) == ("cosine", 0, 0.2)


def test_fp16_offload_and_accumulation(tmp_path):
    settings = read(tmp_path, {
        "train_batch_size": "auto", "gradient_accumulation_steps": 3, "bf16": {"enabled": False},
        "fp16": {
            "enabled": True, "initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 2, "min_loss_scale": 1,
        },
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"},
                              "offload_param": {"device": "cpu"}},
    })  # fmt: skip
    assert settings.plan.global_batch == 12 and settings.plan.offload == "optimizer"
    assert (settings.precision.initial_scale, settings.precision.growth_interval) == (4096.0, 50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type cannot be 'Lamb': the optimizer is AdamW"),
        ({"sparse_gradients": True}, "sparse_gradients cannot be True"),
        ({"amp": {"enabled": True}}, "amp.enabled cannot be True"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_quantized_weights cannot be True",
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device cannot be 'nvme'"),
        ({"fp16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"gradient_accumulation_steps": 3}, "train_batch_size is 16, not 2 of"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type cannot be 'OneCycle'"),
        ({"scheduler": {"type": "WarmupLR"}}, r"warmup_type cannot be log \(the default\)"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}}},
            r"warmup_max_lr, by default, says 0.001, but optimizer.lr is 0.0002",
        ),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages is not supported"),
        ({"train_batch_size": "many"}, "train_batch_size must be int, got 'many'"),
    ],
)
def test_what_cannot_be_done_is_named(tmp_path, change, message):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**DEEPSPEED, **change}))
    with pytest.raises(ValueError, match=message):
        with_deepspeed(SETTINGS, path)


def test_both_say_the_same(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    with pytest.raises(ValueError, match=r"lr says 0.0002, but optimizer.lr is 0.1"):
        with_deepspeed({**SETTINGS, "optimizer": {"lr": 0.1}}, path)
