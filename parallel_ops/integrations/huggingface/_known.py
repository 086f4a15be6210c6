"""The forwards that the replacements were written for: digests (``_source.py``) by role and formula.

A new version of Transformers needs a line only where a forward has changed. ``apply`` then keeps that forward and
reports its digest: read the forward, and add the digest to the formula that it has, or leave it out. Versions are those
that were read: 4.50.3, 4.51.3, 4.53.3, 4.55.4, 4.57.6, 5.0.0, 5.4.0, 5.8.1, 5.12.1, 5.16.1, 5.20.2, 5.23.0.

| role | formulas |
|---|---|
| ``norm`` | RMSNorm; with ``1 + weight``; LayerNorm without weight and eps 1e-5; LayerNorm with a weight alone |
| ``mlp`` | gate and up apart, or in one matrix; GeLU of one matrix; each with or without dropout at the end |
| ``rotary`` | pairs ``(i, R / 2 + i)`` or ``(2i, 2i + 1)``, the latter also by the first half of the tables |
| ``rotary_embedding`` | tables with each angle twice: ``(a, b, a, b)`` or ``(a, a, b, b)`` |
| ``head`` | logits as they are, divided or multiplied by a factor, softly capped; a mixture of experts |
| ``router``, ``experts`` | softmax, then top k; stacked weights, each expert gated |
| ``block`` | GPT-2's two residual additions |
"""

from collections.abc import Callable
from typing import Any

from parallel_ops.integrations.huggingface._source import digest

_KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "mlp": {
        "gelu": (
            "8da674955bf7",  # gpt2, 4.50 to 5.23
        ),
        "gated": (
            "1cce1b0a4706",  # llama and 23 more, 4.50 to 5.23
        ),
        "gate_and_up": (
            "f62385ddbc66",  # phi3, glm, glm4, 4.50 to 5.23
        ),
        "gelu_dropout": (
            "22ae5bc148c5",  # starcoder2, 4.50 to 5.23
        ),
        "gated_dropout": (
            "785422011028",  # seed_oss, 4.57 to 5.23
        ),
    },
    "block": {
        "gpt2": (
            "ef02887adc7f",  # gpt2, 4.50 to 4.51
            "68defb8ea5c8",  # gpt2, 4.53 to 4.55
            "f71acfada2a7",  # gpt2, 4.57
            "978d8dd69b6b",  # gpt2, 5.0
            "95a1380bd585",  # gpt2, 5.4 to 5.23
        ),
    },
    "head": {
        "plain": (
            "a4f9ced24efd",  # gpt2, 4.50 to 4.51
            "3c7fb509cb00",  # llama and 8 more, 4.50
            "eae1929f5c62",  # stablelm, 4.50
            "188aecf779cd",  # llama and 11 more, 4.51 to 4.53
            "f295c388a152",  # stablelm, 4.51 to 5.0
            "3d2374f87358",  # gpt2, 4.53 to 4.57
            "f15a98ec617a",  # llama and 17 more, 4.55 to 5.0
            "90facb28fe67",  # gpt2, 5.0
            "8941a61ca3b6",  # gpt2, 5.4 to 5.20
            "be53add0e494",  # llama and 17 more, 5.4 to 5.20
            "8a15a39cad1a",  # stablelm, 5.4 to 5.20
            "37d6dc600b9f",  # gpt2, 5.23
            "0dfc40692f42",  # llama and 17 more, 5.23
            "096a6ed580fb",  # stablelm, 5.23
        ),
        "mixture": (
            "89fda66e0148",  # mixtral, 4.50
            "894de88aedc9",  # olmoe, 4.50 to 4.53
            "447351c3b9f0",  # mixtral, qwen3_moe, 4.51 to 4.53
            "7fac3f92b90e",  # mixtral, qwen3_moe, olmoe, 4.55 to 5.0
            "1c70e52a2fbd",  # olmoe, 4.55
            "a33694655fe3",  # olmoe, 4.57
            "0b13059b648f",  # mixtral, qwen3_moe, olmoe, 5.4 to 5.12
            "9f477c69137d",  # mixtral, qwen3_moe, olmoe, 5.16 to 5.20
            "8557dade42ff",  # mixtral, qwen3_moe, olmoe, 5.23
        ),
        "softcapped": (
            "f1327b5c8d1e",  # gemma2, 4.50
            "f6f32eeaee7b",  # gemma3, 4.50
            "5ff782659174",  # gemma2, 4.51 to 4.55
            "3b217c1b8022",  # gemma3, 4.51 to 4.55
            "5cae420b2630",  # gemma2, gemma3, 4.57
            "98bc0f890801",  # gemma2, gemma3, 5.0
            "f1381480d72a",  # gemma2, gemma3, 5.4 to 5.20
            "a14a8698d4c8",  # gemma2, gemma3, 5.23
        ),
        "divided": (
            "1bfef3badf77",  # granite, 4.50
            "6bfd969f19e7",  # granite, 4.51 to 5.0
            "48bbbf105ee0",  # granite, 5.4 to 5.20
            "8d2041cfe3dc",  # granite, 5.23
        ),
        "multiplied": (
            "1fcef1823a51",  # cohere, cohere2, 4.50
            "6477c36d54c1",  # cohere, cohere2, 4.51 to 5.0
            "b53d8deed1a4",  # cohere, cohere2, 5.4 to 5.20
            "1ed5b46c09b4",  # cohere, cohere2, 5.23
        ),
    },
    "norm": {
        "rms": (
            "e4e2649db787",  # llama and 22 more, 4.50 to 5.23
            "4d0ed2379df9",  # olmo2, olmo3, 4.53 to 5.23
        ),
        "olmo": (
            "f51439077b08",  # olmo, 4.50 to 5.23
        ),
        "zero_centred_rms": (
            "d874a3d11a75",  # gemma, gemma2, gemma3, 4.50 to 5.23
        ),
        "cohere": (
            "1f37a7ec24ee",  # cohere, cohere2, 4.50 to 5.23
        ),
    },
    "rotary_embedding": {
        "half": (
            "14cd78a2bccd",  # llama and 13 more, 4.50
            "d89010fdb5c5",  # phi3, 4.50
            "ec34d74661f3",  # llama and 22 more, 4.51 to 4.57
            "03c565f98b4e",  # olmo, olmo2, olmo3, 4.53 to 4.57
            "b7a4fcbfbfff",  # qwen3_vl, 4.57
            "61c727b79828",  # llama and 21 more, 5.0 to 5.16
            "753faeb7ee3f",  # olmo, olmo2, 5.0 to 5.16
            "0859922e4993",  # gemma3, 5.0 to 5.12
            "06e4d8c9f15c",  # qwen3_vl, 5.0 to 5.8
            "2fe4b53d34d3",  # qwen3_vl, 5.12 to 5.16
            "04cdc748ba25",  # llama and 14 more, 5.16
            "7e8deaf020fd",  # olmo3, 5.16
            "6c497ac4a08b",  # gemma3, 5.16
            "da34cbd2b6b9",  # llama and 20 more, 5.20 to 5.23
            "4b76329c5b73",  # olmo, olmo2, 5.20 to 5.23
            "e6343b92770e",  # olmo3, 5.20 to 5.23
            "a20e4475d38c",  # gemma3, 5.20 to 5.23
            "80d6502c2881",  # qwen2_vl, qwen2_5_vl, 5.20 to 5.23
            "2ed551b408d3",  # qwen3_vl, 5.20 to 5.23
        ),
        "interleaved": (
            "046097ad610d",  # cohere, cohere2, 4.50
            "cdce847569b0",  # cohere, cohere2, 4.51 to 4.57
            "9a02d2ef821f",  # cohere, cohere2, 5.0 to 5.16
            "8dc708d6f4cb",  # cohere, cohere2, 5.20 to 5.23
        ),
    },
    "rotary": {
        "half": (
            "0eea34241b27",  # llama and 20 more, 4.50 to 4.57
            "9dc68703e05d",  # phi3, 4.50 to 4.57
            "79fecc8b9951",  # olmo, olmo2, olmo3, 4.53 to 4.57
            "f0ffc9dd4c94",  # llama and 21 more, 5.0 to 5.23
            "56c1b2b62bcf",  # olmo, olmo2, olmo3, 5.0 to 5.23
            "b84faa4c8604",  # phi3, 5.0 to 5.23
        ),
        "interleaved_by_half_tables": (
            "f176a75b846d",  # glm, glm4, 4.50 to 4.57
            "bfb777208451",  # glm, glm4, 5.0 to 5.23
        ),
        "interleaved": (
            "36914a301a14",  # cohere, cohere2, 4.50 to 4.57
            "889fc5ca3e37",  # cohere, cohere2, 5.0 to 5.23
        ),
    },
    "experts": {
        "stacked": (
            "9bcb257d1db3",  # mixtral, qwen3_moe, olmoe, 5.0 to 5.16
            "8c4f463e2f67",  # mixtral, qwen3_moe, olmoe, 5.20 to 5.23
        ),
    },
    "router": {
        "softmax_top_k": (
            "9c022092cc76",  # mixtral, 5.8 to 5.23
            "3503997c62ac",  # qwen3_moe, olmoe, 5.8 to 5.23
        ),
    },
}  # fmt: skip

_FORMULAS = {
    role: {known: name for name, all in formulas.items() for known in all} for role, formulas in _KNOWN.items()
}


def formula(role: str, function: Callable[..., Any], owner: type | None = None) -> str | None:
    """What ``function``, a method of ``owner``, computes in ``role``; ``None`` if that is not known."""
    return _FORMULAS[role].get(digest(function, owner) or "")
