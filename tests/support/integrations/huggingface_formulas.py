"""Forwards of Transformers' modules in other words, and such with another formula."""

import torch
import torch.nn.functional as F
import transformers
from transformers.models.llama import modeling_llama

from support.integrations.huggingface_models import OLD

_STOCK_TABLES = modeling_llama.LlamaRotaryEmbedding.forward


def rms(of=lambda x: x, eps=None, outside=0.0, weight=lambda w: w):
    def forward(self, hidden_states):
        x = of(hidden_states.float())
        root = (x.square().mean(-1, keepdim=True) + (self.variance_epsilon if eps is None else eps)).sqrt()
        return weight(self.weight) * (x / (root + outside)).to(hidden_states.dtype)

    return forward


def gated(gate=F.silu, up=lambda x: x, y=lambda y: y):
    def forward(self, x):
        return y(self.down_proj(gate(self.gate_proj(x)) * up(self.up_proj(x))))

    return forward


def up_first(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def rotation(rotate, sign=1):
    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sign * sin.unsqueeze(unsqueeze_dim)
        return tuple(x * cos + rotate(x) * sin for x in (q, k))

    return apply_rotary_pos_emb


def halves(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def tables_that_differ_between_halves(self, x, position_ids):
    cos, sin = _STOCK_TABLES(self, x, position_ids)
    return cos * torch.linspace(0.5, 1.0, cos.shape[-1]), sin


def head(of=lambda logits: logits, plus=lambda logits: 0.0):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = of(self.lm_head(self.model(input_ids, **kwargs).last_hidden_state))
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs) + plus(logits)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    return forward


def block(by=1.0, parallel=False):
    def forward(self, hidden_states, *args, **kwargs):
        mixed = self.attn(self.ln_1(hidden_states), attention_mask=kwargs.get("attention_mask"))
        after = mixed[0] * by + hidden_states
        y = after + self.mlp(self.ln_2(hidden_states if parallel else after))
        return (y, *mixed[1:]) if OLD else y

    return forward


def router(weights=F.softmax, normalize=True):
    def forward(self, hidden_states):
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        chosen, experts = torch.topk(weights(logits.float(), dim=-1), self.top_k)
        return logits, chosen / chosen.sum(-1, keepdim=True) if normalize else chosen, experts

    return forward


def softmax_of_the_chosen(self, hidden_states):
    logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    chosen, experts = torch.topk(logits, self.top_k)
    return logits, chosen.float().softmax(-1), experts


def experts(gate=F.silu, up=lambda x: x):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        total = torch.zeros_like(hidden_states)
        for i in range(self.num_experts):
            rows, places = torch.where(top_k_index == i)
            g, u = F.linear(hidden_states[rows], self.gate_up_proj[i]).chunk(2, -1)
            y = F.linear(gate(g) * up(u), self.down_proj[i]) * top_k_weights[rows, places, None]
            total = total.index_add(0, rows, y.to(total.dtype))
        return total

    return forward
