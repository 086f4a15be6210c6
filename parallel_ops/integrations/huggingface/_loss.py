"""The loss of a causal language model without its logits."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.loss import loss_utils

from parallel_ops.integrations.huggingface._fused import described, is_hooked, stock_class
from parallel_ops.integrations.huggingface._outputs import CausalLMOutputWithoutLogits
from parallel_ops.integrations.huggingface._use import went_to_stock
from parallel_ops.ops import cross_entropy
from parallel_ops.tensor_parallel import vocab_parallel_linear_cross_entropy

# Arguments of a causal language model that its base model does not take.
_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_PARTS = ("logits_to_keep", "num_logits_to_keep")
KINDS = ("plain", "divided", "multiplied", "softcapped", "mixture")  # what is done to the logits
OTHER_REGISTERED_LOSS = "the loss that transformers.loss.loss_utils has for causal language models was replaced"


def head(stock: type[nn.Module]) -> dict[str, Any]:
    """A linear that returns the loss of its outputs if it gets targets."""

    def forward(self: Any, input: Tensor, target: Tensor | None = None, **options: Any) -> Tensor:
        if target is None:
            return stock.forward(self, input)
        return vocab_parallel_linear_cross_entropy(input, self.weight, target, bias=self.bias, **options)

    return {"forward": forward}


def causal_lm(stock: Any, skip_logits: bool, kind: str, base: str) -> dict[str, Any]:
    """A causal language model.

    ``skip_logits``: whether calls in training with labels return no logits by default. ``kind``: one
    of ``KINDS``. ``base``: the name of the base model in it.
    """
    names = [*inspect.signature(stock.forward).parameters][1:]
    skip_default, registered, of_the_class = skip_logits, registered_loss(), stock.loss_function

    def changed_loss(self: Any) -> str | None:
        if stock.loss_function is not of_the_class:
            return f"the loss_function of {stock.__name__} was replaced"
        now = registered_loss()
        if now[0] is registered[0] and now[1] is registered[1] and now[2] is registered[2]:
            return other_loss(self)
        return OTHER_REGISTERED_LOSS

    @functools.wraps(stock.forward)  # Trainer inspects the names of its arguments
    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        wanted = skip_default and self.training if skip_logits is None else skip_logits
        if wanted and _can_skip(self, given) and changed_loss(self) is None and _other_head(self) is None:
            return without_logits(self, given, stock, kind, base)
        if self.training and given.get("labels") is not None:
            went_to_stock(self, "vocab_parallel_linear_cross_entropy", "made logits")
        return stock.forward(self, **given)

    def stock_forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        return stock.forward(self, *args, **kwargs)

    def loss_function(self: Any) -> Any:
        return _loss_of_logits if changed_loss(self) is None else stock.loss_function.__get__(self)

    def set_loss_function(self: Any, value: Any) -> None:
        self._loss_function = value

    def kept(self: Any) -> dict[str, str]:
        reason = changed_loss(self) or _other_head(self)
        return {} if reason is None else {"vocab_parallel_linear_cross_entropy": reason}

    return {
        "forward": forward,
        "stock_forward": stock_forward,
        "kept": kept,
        "loss_function": property(loss_function, set_loss_function),
    }


def other_loss(model: Any) -> str | None:
    """Why the loss of ``model`` is not Transformers' own of causal language models."""
    kind = getattr(model, "loss_type", None)
    if kind is not None and kind != "ForCausalLM":
        return f"its loss_type is {kind!r}"
    own = model.__dict__
    return (
        "it has a loss function of its own" if "_loss_function" in own or "_loss_function" in own["_modules"] else None
    )


def registered_loss() -> tuple[Any, ...]:
    """The functions that compute Transformers' loss of causal language models, which libraries replace."""
    return loss_utils.LOSS_MAPPING.get("ForCausalLM"), loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy


def _other_head(model: Any) -> str | None:
    """Why the output projection cannot return the loss: it was replaced or quantised, or hooks want its logits."""
    head = model.lm_head
    if stock_class(head) is None:
        return f"its lm_head is a {described(head)} since"
    weight = head._parameters.get("weight")
    if hasattr(weight, "__tensor_flatten__") and not isinstance(weight, DTensor):  # which FSDP2 gathers for the head
        return f"the weight of its lm_head is a {described(weight)}, which the op does not take"
    return "there are hooks on lm_head, which must see logits" if is_hooked(head) else None


def _can_skip(model: Any, given: dict[str, Any]) -> bool:
    tuples = given.get("return_dict") is False or not getattr(model.config, "return_dict", True)
    parts = [given.get(name) for name in _PARTS]
    whole = all(part is None or (isinstance(part, int) and part == 0) for part in parts)  # labels are of the kept rows
    return given.get("labels") is not None and not tuples and whole


def without_logits(model: Any, given: dict[str, Any], stock: Any, kind: str, base: str) -> Any:
    """A call of ``model``, a ``stock``, with labels."""
    of_the_loss = {name: given.pop(name, None) for name in _OF_THE_LOSS}
    for name in (*_PARTS, "return_dict"):
        given.pop(name, None)
    mixture = kind == "mixture"
    if mixture and given.get("output_router_logits") is None:
        given["output_router_logits"] = model.config.output_router_logits
    outputs = dict(getattr(model, base)(**given, return_dict=True))
    hidden = outputs.pop("last_hidden_state")
    options: dict[str, Any] = {}
    if kind == "divided":
        hidden = hidden / model.config.logits_scaling
    elif kind == "multiplied":
        hidden = hidden * model.logit_scale
    elif kind == "softcapped":
        options["softcap"] = model.config.final_logit_softcapping
    loss = _reduced(functools.partial(model.lm_head, hidden, **options), hidden, **of_the_loss)
    if mixture and given["output_router_logits"]:
        outputs["aux_loss"] = _auxiliary_loss(model, stock, outputs["router_logits"], given.get("attention_mask"))
        loss = loss + model.router_aux_loss_coef * outputs["aux_loss"].to(loss.device)
    return CausalLMOutputWithoutLogits(loss=loss, **outputs)


def _auxiliary_loss(model: Any, stock: Any, router_logits: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
    """By the function of the model's own family, which skips padding and rounds as Transformers does."""
    function = inspect.unwrap(stock.forward).__globals__["load_balancing_loss_func"]
    loss: Tensor = function(router_logits, model.num_experts, model.num_experts_per_tok, mask)
    return loss


def _loss_of_logits(logits: Tensor, labels: Tensor, vocab_size: Any = None, **options: Any) -> Tensor:
    """Transformers' ``ForCausalLMLoss`` without a copy of the logits in float32."""
    if isinstance(logits, DTensor):  # sharded by vocabulary, for torch's loss_parallel
        whole: Tensor = loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **options)
        return whole
    of_the_loss = {name: options.get(name) for name in _OF_THE_LOSS[1:]}
    return _reduced(functools.partial(cross_entropy, logits), logits, labels, **of_the_loss)


def _reduced(
    loss: Callable[..., Tensor], rows: Tensor, labels: Tensor, shift_labels: Tensor | None,
    num_items_in_batch: Tensor | int | None, ignore_index: int | None,
) -> Tensor:  # fmt: skip
    """``loss`` of the tokens that follow those of ``rows``: the mean, or the sum divided by ``num_items_in_batch``."""
    ignored = -100 if ignore_index is None else ignore_index
    target = F.pad(labels, (0, 1), value=ignored)[..., 1:] if shift_labels is None else shift_labels
    target = target.reshape(rows.shape[:-1]).to(rows.device)
    if num_items_in_batch is None:
        return loss(target=target, ignore_index=ignored)
    total = loss(target=target, ignore_index=ignored, reduction="sum")
    if isinstance(num_items_in_batch, Tensor):
        # A tied head is where the embedding is, with ``device_map="auto"`` on another GPU than the last layer.
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
