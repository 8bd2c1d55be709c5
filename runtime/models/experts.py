"""An MLP of experts, in place of that of a layer: those of Mixtral, Qwen3-MoE, GPT-OSS, DeepSeek-V3 and GLM-4.5."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stepgraph.graphs.layers.dense import activate_and_mul
from stepgraph.graphs.layers.experts import choose_experts, choose_grouped_experts, combine_experts, expert_linear
from stepgraph.graphs.layers.huge_pages import empty_weight
from stepgraph.graphs.layers.linear import linear
from stepgraph.graphs.layers.lora import Adapted
from stepgraph.runtime.models.llama_config import ExpertsConfig, LlamaConfig


class ExpertMlp(nn.Module):
    """Six operations, or eleven with a router in float32 and a shared MLP. Which experts a token takes is read on the device; a row's
    result does not depend on the other rows."""

    def __init__(self, config: LlamaConfig, experts: ExpertsConfig, like: Tensor) -> None:
        super().__init__()
        self.experts, self.activation = experts, config.activation
        routed = torch.empty(0, dtype=torch.float32, device=like.device) if experts.routing else like
        shapes = {
            "router": (routed, experts.count, config.hidden_size),
            "gate_up": (like, experts.count * 2 * experts.size, config.hidden_size),
            "down": (like, experts.count * config.hidden_size, experts.size),
        }
        for name, (kind, outer, inner) in shapes.items():
            self.register_parameter(name, empty_weight(kind, outer, inner))
            self.register_parameter(f"{name}_bias", empty_weight(kind, outer) if experts.biased else None)
        self.router: nn.Parameter
        self.gate_up: nn.Parameter
        self.down: nn.Parameter
        self.router_bias: nn.Parameter | None
        self.gate_up_bias: nn.Parameter | None
        self.down_bias: nn.Parameter | None
        self.correction = empty_weight(routed, experts.count) if experts.routing else None
        if experts.shared_size:
            self.shared_gate_up = empty_weight(like, 2 * experts.shared_size, config.hidden_size)
            self.shared_down = empty_weight(like, config.hidden_size, experts.shared_size)

    def forward(self, states: Tensor, adapted: Adapted) -> Tensor:
        count = self.experts.count
        shares, chosen = self._choose(states)
        gated = activate_and_mul(expert_linear(states, chosen, self.gate_up, count, self.gate_up_bias), self.activation)
        found = combine_experts(expert_linear(gated, chosen, self.down, count, self.down_bias), shares)
        if not self.experts.shared_size:
            return found
        gated = activate_and_mul(adapted("shared_gate_up", states, linear(states, self.shared_gate_up)), self.activation)
        return found + adapted("shared_down", gated, linear(gated, self.shared_down))

    def _choose(self, states: Tensor) -> tuple[Tensor, Tensor]:
        experts, routing = self.experts, self.experts.routing
        if routing is None or self.correction is None:
            return choose_experts(linear(states, self.router, self.router_bias), experts.taken, experts.normalised)
        logits = linear(states.to(self.router.dtype), self.router)
        groups = routing.groups, routing.groups_taken
        return choose_grouped_experts(logits, self.correction, experts.taken, *groups, experts.normalised, routing.factor)
