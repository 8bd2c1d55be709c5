"""Heads for training: sizes, initial weights, and saving in a folder that an engine loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from stepgraph.graphs.model import DraftModel
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.llama import Llama, LlamaLayer
from stepgraph.runtime.models.llama_config import Eagle3Config
from stepgraph.runtime.models.mtp import Mtp, MtpModule
from tools.train.saving import save_eagle3, save_mtp
from tools.train.unroll import Eagle3Learner, Learner, MtpLearner

KINDS = ("eagle3", "mtp")
_NOISE = 0.02  # added to copied weights, so that rows differ


class Head:
    """A float32 head with the embedding and output head of its target, which are not trained.

    `proposed`: target ids of the tokens that the loss covers; an MTP head still proposes all tokens.
    """

    def __init__(
        self, kind: str, target: Llama, proposed: Tensor, feature_layers: tuple[int, ...], seed: int, middle: int | None = None
    ) -> None:
        self.kind, self.target, self.proposed = kind, target, proposed
        generator = torch.Generator().manual_seed(seed)
        self.module: Eagle3 | Mtp = (
            _eagle3(target, proposed, feature_layers, generator, middle) if kind == "eagle3" else _mtp(target, generator, middle)
        )
        self.learner: Learner
        self.learner = Eagle3Learner(self.module) if isinstance(self.module, Eagle3) else MtpLearner(self.module)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters."""
        shared = ("embedding",) if isinstance(self.module, Eagle3) else ("embedding", "head")
        return {name: parameter for name, parameter in self.module.named_parameters() if name not in shared}

    @property
    def out(self) -> Tensor:
        """[D, H], output rows of the proposed tokens."""
        return self.module.head if isinstance(self.module, Eagle3) else self.target_rows

    @property
    def target_rows(self) -> Tensor:
        """[D, H], the target's output rows of these tokens."""
        return _output(self.target)[self.proposed]

    def drafter(self) -> DraftModel:
        """The head in the target's dtype, as in an engine."""
        target, module = self.target, self.module
        made: Eagle3 | Mtp
        if isinstance(module, Eagle3):
            config = replace(module.config, layer=replace(module.config.layer, dtype=target.config.dtype))
            made = Eagle3(config, d2t=self.proposed, embedding=target.embedding, device=target.embedding.device)
        else:
            made = Mtp(
                replace(module.config, dtype=target.config.dtype),
                embedding=target.embedding,
                head=_output(target),
                device=target.embedding.device,
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                made.get_parameter(name).copy_(parameter)
        return made.eval()

    def save(self, folder: Path) -> None:
        made = self.drafter()
        if isinstance(made, Eagle3):
            save_eagle3(folder, made)
        else:
            assert isinstance(made, Mtp)
            save_mtp(folder, made, first=self.target.config.num_layers)


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """Default layers of an EAGLE-3 head: near the input, in the middle, near the end; distinct for a tiny target."""
    if layers >= 6:
        return 2, layers // 2, layers - 3
    return 0, layers // 2, layers


def _eagle3(target: Llama, proposed: Tensor, feature_layers: tuple[int, ...], generator: torch.Generator, middle: int | None) -> Eagle3:
    """The layer starts as a copy of the target's last one, on the state nearest to it; the weights of the token part start small."""
    ours = target.config
    layer = replace(
        ours,
        windows=(None,),
        qkv_bias=False,
        output_bias=False,
        head_norms=False,
        tied=False,
        dtype=torch.float32,
        intermediate_size=middle or ours.intermediate_size,
    )
    config = Eagle3Config(layer, feature_layers, ours.hidden_size, len(proposed))
    head = Eagle3(config, d2t=proposed, embedding=target.embedding, device=target.embedding.device)
    for parameter in _own(head, ("embedding",)):
        _fill(parameter, generator)
    hidden = ours.hidden_size
    with torch.no_grad():
        _copy_layer(head.layer, target.layers[-1], slice(hidden, 2 * hidden))
        head.fuse.mul_(_NOISE)[:, -hidden:].add_(torch.eye(hidden, device=head.fuse.device))
        head.norm.copy_(target.norm)
        head.head.copy_(_output(target)[proposed])
    return head


def _mtp(target: Llama, generator: torch.Generator, middle: int | None) -> Mtp:
    ours = target.config
    config = replace(ours, windows=ours.windows[-1:], tied=False, dtype=torch.float32, intermediate_size=middle or ours.intermediate_size)
    head = Mtp(config, embedding=target.embedding, head=_output(target), device=target.embedding.device)
    for parameter in _own(head, ("embedding", "head")):
        _fill(parameter, generator)
    hidden, (module,) = ours.hidden_size, head.depths
    assert isinstance(module, MtpModule)
    with torch.no_grad():
        _copy_layer(module.layer, target.layers[-1], slice(0, hidden))
        module.join.mul_(0.5)[:, hidden:].add_(torch.eye(hidden, device=module.join.device), alpha=0.5)
        module.norm.copy_(target.norm)
    return head


def _copy_layer(layer: LlamaLayer, its: nn.Module, columns: slice) -> None:
    """Copy parameters of equal shape; attention reads the state in `columns` of its input."""
    assert isinstance(its, LlamaLayer)
    layer.qkv[:, columns].copy_(its.qkv)
    for name, parameter in layer.named_parameters():
        taken = getattr(its, name)
        if name != "qkv" and taken is not None and taken.shape == parameter.shape:
            parameter.copy_(taken)


def _own(head: nn.Module, shared: tuple[str, ...]) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in head.named_parameters() if name not in shared)


@torch.no_grad()
def _fill(parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Norm weights of one; matrices that keep the scale of their input."""
    if parameter.dim() == 1:
        parameter.fill_(1)
    else:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)


def _output(target: Llama) -> nn.Parameter:
    return target.embedding if target.head is None else target.head
