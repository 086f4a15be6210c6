"""A tiny Llama and a GPT-2 of Transformers, trained as they are and with the ops in them: losses and gradient norms.

python examples/huggingface_drop_in.py         # CPU or GPU; without dropout, whose masks would differ
"""

import copy
import time

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from parallel_ops.integrations import huggingface

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
configs = {
    "Llama": LlamaConfig(
        vocab_size=4_096, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4
    ),
    "GPT-2": GPT2Config(
        vocab_size=4_096, n_embd=128, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip


def steps(model, batches):
    """(loss, gradient norm) of each step, and seconds and bytes of GPU memory of all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results, start = [], time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results, time.perf_counter() - start, torch.cuda.max_memory_allocated() if device.type == "cuda" else None


for name, config in configs.items():
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config).to(device).train()
    model = copy.deepcopy(stock)
    print(huggingface.apply(model))  # the one line
    batches = torch.randint(4_096, (8, 2, 128)).to(device)
    expected, stock_seconds, stock_bytes = steps(stock, batches)
    got, seconds, bytes_ = steps(model, batches)
    print(f"{name:5s}  loss, stock and ours  gradient norm, stock and ours")
    for (loss, norm), (our_loss, our_norm) in zip(expected, got, strict=True):
        print(f"       {loss:9.6f} {our_loss:9.6f}   {norm:9.6f} {our_norm:9.6f}")
    if bytes_ is not None:
        print(
            f"       {stock_seconds:.2f} s and {stock_bytes >> 20} MiB of stock, {seconds:.2f} s and {bytes_ >> 20} MiB"
        )
