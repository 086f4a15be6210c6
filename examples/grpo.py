"""Group relative policy optimisation in plain code: a tiny model learns to answer with multiples of 3.

python examples/grpo.py

Log-probabilities and entropies come from hidden states, chunk by chunk: the logits of whole sequences never exist. Only
the last token's logits are computed, to draw the next one.
"""

import torch
from torch import nn

from parallel_ops import grpo_loss, linear_log_probs
from parallel_ops.layers import Norm, ParallelTransformerLayer, VocabParallelEmbedding

VOCAB, PROMPT, ANSWER, HIDDEN, GROUPS, GROUP = 32, 4, 8, 64, 4, 8


class Policy(nn.Module):
    """Tokens [s, b] to hidden states [s, b, HIDDEN]; the embedding is the output embedding too."""

    def __init__(self):
        super().__init__()
        self.tokens = VocabParallelEmbedding(VOCAB, HIDDEN, tp_mesh=None, init_method=lambda w: w.normal_(std=0.1))
        self.layers = nn.Sequential(*(ParallelTransformerLayer(HIDDEN, 4, tp_mesh=None) for _ in range(2)))
        self.norm = Norm(HIDDEN)

    def forward(self, tokens):
        return self.norm(self.layers(self.tokens(tokens)))


@torch.no_grad()
def answers(policy, prompts):
    tokens = prompts
    for _ in range(ANSWER):
        logits = policy(tokens)[-1] @ policy.tokens.weight.T
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1).T])
    return tokens


def log_probs_of(policy, tokens):
    hidden = policy(tokens[:-1])[PROMPT - 1 :]
    return linear_log_probs(hidden, policy.tokens.weight, tokens[PROMPT:])


def main(steps=20):
    """Returns the mean reward of each step."""
    torch.manual_seed(0)
    policy, reference, rewards = Policy(), Policy(), []
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for step in range(steps):
        prompts = torch.randint(VOCAB, (PROMPT, GROUPS)).repeat_interleave(GROUP, dim=1)
        tokens = answers(policy, prompts)
        reward = (tokens[PROMPT:] % 3 == 0).float().mean(0)
        groups = reward.view(GROUPS, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        with torch.no_grad():
            old, further = log_probs_of(policy, tokens).log_probs, log_probs_of(reference, tokens).log_probs
        for _ in range(2):
            log_probs, entropy = log_probs_of(policy, tokens)
            loss = grpo_loss(log_probs, old, advantages.flatten(), reference_log_probs=further, kl_weight=0.01)
            optimizer.zero_grad()
            (loss - 0.001 * entropy.mean()).backward()
            optimizer.step()
        rewards.append(float(reward.mean()))
        if step % 5 == 0 or step == steps - 1:
            print(f"step {step:2}  reward {rewards[-1]:.2f}  entropy {float(entropy.detach().mean()):.2f}")
    return rewards


if __name__ == "__main__":
    main()
