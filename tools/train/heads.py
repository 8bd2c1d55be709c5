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
from tools.train.unroll import TrainableEagle3, TrainableHead, TrainableMtp

KINDS = ("eagle3", "mtp")
_NOISE_SCALE = 0.02  # added to copied weights, so that rows differ


class Head:
    """A float32 head with the embedding and output head of its target, which are not trained.

    `d2t`: target ids of the tokens that the loss covers; an MTP head still proposes all tokens.
    """

    def __init__(
        self, kind: str, target: Llama, d2t: Tensor, feature_layers: tuple[int, ...], seed: int, mlp_size: int | None = None
    ) -> None:
        self.kind, self.target, self.d2t = kind, target, d2t
        generator = torch.Generator().manual_seed(seed)
        self.module: Eagle3 | Mtp = (
            _eagle3(target, d2t, feature_layers, generator, mlp_size) if kind == "eagle3" else _mtp(target, generator, mlp_size)
        )
        self.trainable: TrainableHead
        self.trainable = TrainableEagle3(self.module) if isinstance(self.module, Eagle3) else TrainableMtp(self.module)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters."""
        shared = ("embedding",) if isinstance(self.module, Eagle3) else ("embedding", "head")
        return {name: parameter for name, parameter in self.module.named_parameters() if name not in shared}

    @property
    def rows(self) -> Tensor:
        """[D, H], output rows of the proposed tokens."""
        return self.module.head if isinstance(self.module, Eagle3) else self.target_rows

    @property
    def target_rows(self) -> Tensor:
        """[D, H], the target's output rows of these tokens."""
        return _output_head(self.target)[self.d2t]

    def drafter(self) -> DraftModel:
        """The head in the target's dtype, as in an engine."""
        target, module = self.target, self.module
        drafter: Eagle3 | Mtp
        if isinstance(module, Eagle3):
            config = replace(module.config, layer=replace(module.config.layer, dtype=target.config.dtype))
            drafter = Eagle3(config, d2t=self.d2t, embedding=target.embedding, device=target.embedding.device)
        else:
            drafter = Mtp(
                replace(module.config, dtype=target.config.dtype),
                embedding=target.embedding,
                head=_output_head(target),
                device=target.embedding.device,
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                drafter.get_parameter(name).copy_(parameter)
        return drafter.eval()

    def save(self, folder: Path) -> None:
        drafter = self.drafter()
        if isinstance(drafter, Eagle3):
            save_eagle3(folder, drafter)
        else:
            assert isinstance(drafter, Mtp)
            save_mtp(folder, drafter, first=self.target.config.num_layers)


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """Default layers of an EAGLE-3 head: near the input, in the middle, near the end; distinct for a tiny target."""
    if layers >= 6:
        return 2, layers // 2, layers - 3
    return 0, layers // 2, layers


def _eagle3(target: Llama, d2t: Tensor, feature_layers: tuple[int, ...], generator: torch.Generator, mlp_size: int | None) -> Eagle3:
    """The layer starts as a copy of the target's last one, on the state nearest to it; the weights of the token part start small."""
    base = target.config
    layer = replace(
        base,
        windows=(None,),
        qkv_bias=False,
        output_bias=False,
        head_norms=False,
        tied=False,
        dtype=torch.float32,
        intermediate_size=mlp_size or base.intermediate_size,
    )
    config = Eagle3Config(layer, feature_layers, base.hidden_size, len(d2t))
    head = Eagle3(config, d2t=d2t, embedding=target.embedding, device=target.embedding.device)
    for parameter in _trained_parameters(head, ("embedding",)):
        _initialise(parameter, generator)
    hidden = base.hidden_size
    with torch.no_grad():
        _copy_layer(head.layer, target.layers[-1], slice(hidden, 2 * hidden))
        head.fuse.mul_(_NOISE_SCALE)[:, -hidden:].add_(torch.eye(hidden, device=head.fuse.device))
        head.norm.copy_(target.norm)
        head.head.copy_(_output_head(target)[d2t])
    return head


def _mtp(target: Llama, generator: torch.Generator, mlp_size: int | None) -> Mtp:
    base = target.config
    config = replace(base, windows=base.windows[-1:], tied=False, dtype=torch.float32, intermediate_size=mlp_size or base.intermediate_size)
    head = Mtp(config, embedding=target.embedding, head=_output_head(target), device=target.embedding.device)
    for parameter in _trained_parameters(head, ("embedding", "head")):
        _initialise(parameter, generator)
    hidden, (module,) = base.hidden_size, head.depths
    assert isinstance(module, MtpModule)
    with torch.no_grad():
        _copy_layer(module.layer, target.layers[-1], slice(0, hidden))
        module.join.mul_(0.5)[:, hidden:].add_(torch.eye(hidden, device=module.join.device), alpha=0.5)
        module.norm.copy_(target.norm)
    return head


def _copy_layer(layer: LlamaLayer, source: nn.Module, columns: slice) -> None:
    """Copy parameters of equal shape; attention reads the state in `columns` of its input."""
    assert isinstance(source, LlamaLayer)
    layer.qkv[:, columns].copy_(source.qkv)
    for name, parameter in layer.named_parameters():
        copied = getattr(source, name)
        if name != "qkv" and copied is not None and copied.shape == parameter.shape:
            parameter.copy_(copied)


def _trained_parameters(head: nn.Module, shared: tuple[str, ...]) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in head.named_parameters() if name not in shared)


@torch.no_grad()
def _initialise(parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Norm weights of one; matrices that keep the scale of their input."""
    if parameter.dim() == 1:
        parameter.fill_(1)
    else:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)


def _output_head(target: Llama) -> nn.Parameter:
    return target.embedding if target.head is None else target.head
