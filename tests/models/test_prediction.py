"""Multi-token prediction beside a module in plain PyTorch around a layer of Transformers' DeepSeek-V3; its files."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import nn

from parallel_ops.models import Transformer, config_from_pretrained
from parallel_ops.models.huggingface import tensor_files
from parallel_ops.models.prediction import further
from parallel_ops.planner import Plan
from support.integrations.huggingface import LENGTH, VOCAB
from support.integrations.huggingface_folders import DEEPSEEK, assert_same_gradients
from support.parallelism import expert_parallel
from support.ranks.distributed import ranks
from support.runs.tensor_files import tensors_in

LAYERS, WEIGHT = 2, 0.3


class Reference(nn.Module):
    """The model, and the module of arXiv:2412.19437, equations 21 to 25, one for each token after the next."""

    def __init__(self, depth):
        super().__init__()
        options = DEEPSEEK | {"num_hidden_layers": LAYERS + depth, "attn_implementation": "sdpa"}
        self.stock = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**options))
        layers = self.stock.model.layers
        self.stock.model.layers, self.layers = layers[:LAYERS], layers[LAYERS:]
        self.stock.config.num_hidden_layers, self.stock.config.num_nextn_predict_layers = LAYERS, depth
        size = DEEPSEEK["hidden_size"]
        for layer in self.layers:
            layer.enorm, layer.hnorm, layer.shared_head = (nn.RMSNorm(size, eps=1e-6) for _ in range(3))
            layer.eh_proj = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(torch.rand(p.shape) + 0.5 if p.dim() == 1 else torch.randn(p.shape) * 0.2)
                assert name

    def forward(self, tokens, targets):
        """``[b, s]`` each; -100 where there is no target."""
        base, head = self.stock.model, self.stock.lm_head
        h = base(tokens).last_hidden_state
        total = F.cross_entropy(head(h).flatten(0, 1), targets.flatten())
        places = torch.arange(tokens.shape[1])[None]
        for k, layer in enumerate(self.layers, 1):
            ahead, later = tokens.roll(-k, 1), targets.roll(-k, 1)
            ahead[:, -k:] = 0  # any: it is behind all that count
            later[:, -k:] = -100
            x = layer.eh_proj(torch.cat([layer.enorm(base.embed_tokens(ahead)), layer.hnorm(h)], -1))
            x = layer(x, position_embeddings=base.rotary_emb(x, places), position_ids=places)
            h = layer.shared_head(x[0] if isinstance(x, tuple) else x)
            loss = F.cross_entropy(head(h).flatten(0, 1), later.flatten(), reduction="sum")
            total = total + WEIGHT / len(self.layers) * loss / (targets != -100).sum()
        return total

    def save(self, folder):
        """As DeepSeek publishes it: these layers behind the others, each with a copy of embedding and head."""
        self.stock.save_pretrained(folder)
        tensors = tensors_in(folder)
        spare = transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**DEEPSEEK | {"num_hidden_layers": LAYERS + len(self.layers)})
        )
        spare.model.layers = nn.ModuleList([*self.stock.model.layers, *self.layers])
        spare.save_pretrained(folder / "further")
        for name, t in tensors_in(folder / "further").items():
            if any(f"layers.{LAYERS + k}." in name for k in range(len(self.layers))):
                tensors[name.replace("shared_head.", "shared_head.norm.")] = t
        for k in range(len(self.layers)):
            for name, t in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
                tensors[f"model.layers.{LAYERS + k}.{name}.weight"] = tensors[f"{t}.weight"].clone()
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        save_file(tensors, folder / tensor_files.SINGLE)
        return tensors


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The folders of the weights and of the gradients, and the loss, of models with two such layers."""
    folder = tmp_path_factory.mktemp("prediction")
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = Reference(2)
    weights = model.save(folder / "m")
    tokens, targets = torch.randint(VOCAB, (2, LENGTH, 4), generator=torch.Generator().manual_seed(2))
    loss = model(tokens.t(), targets.t())
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    return folder / "m", weights, tokens, targets, loss.detach(), model.save(folder / "gradients")


@pytest.mark.parametrize(
    "plan", ["dp=1", "dp=1,tp=2,sequence_parallel=true", "dp=1,tp=2", "dp=1,cp=2,ep=2,zero=1", "dp=4,ep=4,zero=3"]
)
def test_losses_and_gradients_are_those_of_plain_pytorch(plan, case, tmp_path):
    folder, _, tokens, targets, loss, want = case
    text = f"{plan},global_batch=4,micro_batch={4 // int(plan[3])},dtype=fp32"
    found = ranks(Plan.parse(text).gpus).run(
        expert_parallel.folder_gradients, str(folder), text, tokens, targets, str(tmp_path / "g")
    )
    torch.testing.assert_close(torch.stack(found).mean(), loss, rtol=1e-5, atol=0)
    assert_same_gradients(tmp_path / "g", want)


def test_folders_are_read_and_written_back(case, tmp_path):
    folder, weights, tokens, targets, *_ = case
    config = config_from_pretrained(folder)
    assert (config.num_layers, config.prediction_layers) == (LAYERS, 2)
    model = Transformer.from_pretrained(folder).eval()
    model.save_pretrained(tmp_path / "again")
    again = tensors_in(tmp_path / "again")
    assert again.keys() == weights.keys() and all(torch.equal(t, weights[name]) for name, t in again.items())
    assert json.loads((tmp_path / "again" / tensor_files.CONFIG).read_text())["num_nextn_predict_layers"] == 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")  # which leaves these layers out
    torch.testing.assert_close(model(tokens).transpose(0, 1), theirs(tokens.t()).logits, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / tensor_files.CONFIG).read_text())["num_nextn_predict_layers"] == 2
    assert config_from_pretrained(tmp_path / "theirs").prediction_layers == 0
    without = Transformer.from_pretrained(folder, config=replace(config, prediction_layers=0))
    assert not any(f"layers.{LAYERS}." in name for name in without.state_dict())
    torch.testing.assert_close(without(tokens, targets), model(tokens, targets))
    assert Transformer.from_pretrained(folder, config=replace(config, prediction_weight=0.1)).training


def test_a_copy_that_differs_is_refused(case, tmp_path):
    folder, weights, *_ = case
    (tmp_path / tensor_files.CONFIG).write_text((folder / tensor_files.CONFIG).read_text())
    name = f"model.layers.{LAYERS}.shared_head.head.weight"
    save_file(weights | {name: weights[name] + 1}, tmp_path / tensor_files.SINGLE)
    with pytest.raises(ValueError, match=f"has {name} that differs from the output layer it should be tied to"):
        Transformer.from_pretrained(tmp_path)


@pytest.mark.parametrize("by", [1, 3, 12])
@pytest.mark.parametrize("starts", [None, (0, 4, 5, 5, 10)])
def test_targets_end_where_tokens_of_another_document_would_be_read(by, starts):
    tokens = torch.arange(20).view(10, 2)
    targets = tokens + 2
    targets[6, 1] = -100
    ahead, later = further(tokens, targets, by, None if starts is None else torch.tensor(starts))
    ends = [10] if starts is None else starts
    for row in range(10):
        end = next(e for e in ends if e > row)
        for column in range(2):
            inside = row + by < end
            assert later[row, column] == (targets[row + by, column] if inside else -100)
            assert not inside or ahead[row, column] == tokens[row + by, column]


def test_what_does_not_fit_is_refused(case):
    config = config_from_pretrained(case[0])
    with pytest.raises(ValueError, match="prediction_layers must be an int of at least 1, got -1"):
        replace(config, prediction_layers=-1)
    with pytest.raises(ValueError, match=r"prediction_weight must be at least 0 and finite, got -0\.1"):
        replace(config, prediction_weight=-0.1)
    with pytest.raises(ValueError, match="aux_loss_over must be 'layer' with prediction_layers"):
        replace(config, experts=replace(config.experts, aux_loss=0.1, aux_loss_over="model"))
