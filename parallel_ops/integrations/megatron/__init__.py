"""The package's ops in Megatron-core, 0.16 to 0.19.

    from parallel_ops.integrations import megatron

    megatron.apply()                                           # any model, built before or after, runs on these ops
    spec = megatron.gpt_block_spec(config)                     # and, for new models, the layers too
    GPTModel(config, transformer_layer_spec=spec, ...)

``apply`` replaces functions, attention included; ``undo()`` of its result restores them. A spec replaces modules:
linears that overlap communication, ring attention, norms that support sequence parallelism. Each works without the
other, and neither needs Apex or Transformer Engine. See ``docs/megatron.md``.
"""

import importlib.util

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    raise ImportError(
        "parallel_ops.integrations.megatron needs megatron-core, 0.16 to 0.19, numpy and packaging: "
        "pip install --no-deps megatron-core; pip install numpy packaging"
    )

from parallel_ops.integrations.megatron.cpu import on_cpu
from parallel_ops.integrations.megatron.hybrid import hybrid_stack_spec
from parallel_ops.integrations.megatron.replacements import OPS, Applied, apply
from parallel_ops.integrations.megatron.specs import ParallelOpsSpecProvider, gpt_block_spec, gpt_layer_spec

__all__ = [
    "OPS",
    "Applied",
    "ParallelOpsSpecProvider",
    "apply",
    "gpt_block_spec",
    "gpt_layer_spec",
    "hybrid_stack_spec",
    "on_cpu",
]
