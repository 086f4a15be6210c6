"""Long enough to show a gradient that is wrong in the late digits: 200 steps on real text."""

import dataclasses

import torch

from parallel_ops.models import FUSED, PLAIN, GPTConfig
from parallel_ops.train.config import TrainConfig
from parallel_ops.train.data import load_text
from parallel_ops.train.loop import Trainer

MODEL = GPTConfig(
    vocab_size=256,
    seq_length=64,
    layers=2,
    hidden=64,
    heads=4,
    activation="swiglu",
    positions="rotary",
    norm="rms_norm",
)
CONFIG = TrainConfig(model=MODEL, steps=200, batch=8, lr=2e-3)


def curve(config, ops, tokens):
    trainer = Trainer(config, ops, tokens)
    return torch.tensor([trainer.step().loss for _ in range(config.steps)], dtype=torch.float64)


def test_fused_bfloat16_training_follows_plain_float32():
    tokens = load_text(None)
    plain = curve(CONFIG, PLAIN, tokens)
    fused = curve(dataclasses.replace(CONFIG, dtype="bfloat16"), FUSED, tokens)
    assert plain[0] > 5 and plain[-20:].mean() < 3.0  # it did learn
    torch.testing.assert_close(fused, plain, rtol=0.005, atol=0)
