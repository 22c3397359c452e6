"""Small transformers with weights so large that the form of their gates matters, and tokens for them."""

import small_networks as networks
import torch
from small_networks import VOCABULARY

from hf_lgelu.graph.layers import find_layers
from hf_lgelu.graph.recording import Recording
from hf_lgelu.networks.sites import find_sites
from hf_lgelu.refit.widen import find_blocks


def tokens(count=60, length=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(VOCABULARY, (count, length), generator=generator)}


def loud(model, factor=3.0):
    """Weights so large that the gates' form matters."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, factor / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def llama(layers=2, **more):
    sizes = {"num_hidden_layers": layers, "intermediate_size": 40, "num_key_value_heads": 2, "pad_token_id": None}
    return loud(networks.llama(**sizes | more), 1.0)


def gpt2(layers=2):
    return loud(networks.gpt2(n_layer=layers, n_inner=None), 1.0)


def bert(layers=2):
    return loud(networks.bert(num_hidden_layers=layers, intermediate_size=40), 1.0)


def traced(model, inputs):
    """(gates, what a trace of the model computes, layers that read the gates, blocks) by these inputs."""
    sites = find_sites(model)
    traced = Recording(model, sites, inputs)
    found = find_layers(traced, model, sites)
    return sites, traced, found, find_blocks(traced, found.layers, found.fed_gates)
