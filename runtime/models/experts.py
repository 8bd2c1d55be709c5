"""An MLP of experts, in place of that of a layer: those of Mixtral, Qwen3-MoE and GPT-OSS."""

from __future__ import annotations

from torch import Tensor, nn

from stepgraph.graphs.layers.dense import activate_and_mul
from stepgraph.graphs.layers.experts import choose_experts, combine_experts
from stepgraph.graphs.layers.linear import linear
from stepgraph.graphs.layers.quantised_experts import expert_linear
from stepgraph.runtime.models.llama_config import ExpertsConfig, LlamaConfig


class ExpertMlp(nn.Module):
    """Six operations. Which experts a token takes is read on the device; a row's result does not depend on the other rows."""

    def __init__(self, config: LlamaConfig, experts: ExpertsConfig, like: Tensor) -> None:
        super().__init__()
        self.experts, self.activation = experts, config.activation
        shapes = {
            "router": (experts.count, config.hidden_size),
            "gate_up": (experts.count * 2 * experts.size, config.hidden_size),
            "down": (experts.count * config.hidden_size, experts.size),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(like.new_empty(shape), requires_grad=False))
            bias = nn.Parameter(like.new_empty(shape[:1]), requires_grad=False) if experts.biased else None
            self.register_parameter(f"{name}_bias", bias)
        self.router: nn.Parameter
        self.gate_up: nn.Parameter
        self.down: nn.Parameter
        self.router_bias: nn.Parameter | None
        self.gate_up_bias: nn.Parameter | None
        self.down_bias: nn.Parameter | None

    def forward(self, states: Tensor) -> Tensor:
        count = self.experts.count
        shares, chosen = choose_experts(linear(states, self.router, self.router_bias), self.experts.taken, self.experts.normalised)
        gated = activate_and_mul(expert_linear(states, chosen, self.gate_up, count, self.gate_up_bias), self.activation)
        return combine_experts(expert_linear(gated, chosen, self.down, count, self.down_bias), shares)
