"""Sizes of tiny models of Transformers, with weights so large that every part shows in the logits."""

LENGTH, VOCAB = 20, 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GPT2_SIZES = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2,
}  # fmt: skip


def fully_sharded_steps(rank, family, drop_in):
    """Losses and gradient norms of three steps of FSDP2, each rank with a batch of its own."""
    import torch
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from parallel_ops.integrations import huggingface

    torch.manual_seed(0)
    if family == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(**GPT2_SIZES, **dropouts)
    else:
        config = {"llama": transformers.LlamaConfig, "mixtral": transformers.MixtralConfig}[family](**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    if drop_in:
        huggingface.apply(model)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.transformer.h if family == "gpt2" else model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, results = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results
