"""The outputs of a causal language model whose call made no logits. Reading them is an error that says how to get them.

They have the fields of Transformers' outputs but ``logits``, so what goes through all fields (FSDP, DDP, Accelerate,
``Trainer``) works as before; ``outputs.get("logits")`` and ``getattr(outputs, "logits", None)`` are ``None``.
"""

from dataclasses import fields, make_dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, MoeCausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

_ERROR = (
    "outputs.logits: this call in training with labels made no logits, which saves their memory; call "
    "model(..., skip_logits=False), or huggingface.apply(model, skip_logits=False), to have them"
)


# By Transformers' own names: past_key_values is cache since 5.24.
_FIELDS = dict.fromkeys(
    field.name for stock in (MoeCausalLMOutputWithPast, CausalLMOutputWithCrossAttentions) for field in fields(stock)
)
_FIELDS["shared_kv_states"] = None  # Gemma 4
_Fields = make_dataclass("_Fields", [(name, Any, None) for name in _FIELDS if name != "logits"], bases=(ModelOutput,))


class CausalLMOutputWithoutLogits(_Fields):  # type: ignore[misc, valid-type]
    @property
    def logits(self) -> Tensor:
        raise AttributeError(_ERROR)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key == "logits":
                raise KeyError(_ERROR)
            return super().__getitem__(key)
        before = tuple(self[name] for name in ("loss", "aux_loss") if name in self)  # logits are next in a tuple
        last = (len(before) + 1 if key.stop is None else key.stop) - 1 if isinstance(key, slice) else key
        if not 0 <= last < len(before):
            raise IndexError(_ERROR)
        return before[key]

    def to_tuple(self) -> Any:
        raise IndexError(_ERROR)
