"""Model folders for the implementation of `transformers`, and MTP modules for such models: checked before weights are loaded.

`open_target` opens any target, with the class that runs it: a native one, or that of `transformers`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from stepgraph.runtime.models.files.checkpoint import DEQUANTISED, Checkpoint, WeightsMode, open_checkpoint
from stepgraph.runtime.models.files.config_fields import DTYPES, LAYER_TYPES, UnsupportedConfigError
from stepgraph.runtime.models.files.draft_layouts import MAX_DRAFTS, count_mtp_modules, mtp_layers
from stepgraph.runtime.models.files.weights import SafetensorsSource, check_stored, read_finite, read_json, require_finite
from stepgraph.runtime.models.mtp import TransformersMtp
from stepgraph.sampling.fields import check_value, checked_path, clip_error, clip_repr, error_summary, one_of
from stepgraph.sampling.grammar.tokenizers.readers import read_folder
from stepgraph.sampling.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from stepgraph.runtime.models.llama import Llama
    from stepgraph.runtime.models.transformers_model import ModelSizes, TransformersModel

Implementation = Literal["auto", "native", "transformers"]
AUTO, NATIVE, TRANSFORMERS = get_args(Implementation)
_EXPERTS_IMPLEMENTATION = "batched_mm"  # the implementation of experts that reads nothing on the host
_VARYING_ROPE = ("dynamic", "longrope")
_JOIN = {"enorm.weight": "token_norm", "hnorm.weight": "state_norm", "eh_proj.weight": "join"}
_COPIES = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "unembedding"}  # copies of target tensors
_LAST_NORM = "shared_head.norm.weight"


@dataclass(frozen=True)
class TransformersCheckpoint:
    """A model of `transformers` whose config, layers and vocabulary were checked; its weights are not in memory yet."""

    path: Path
    config: ModelSizes
    vocabulary: Vocabulary
    meta_model: Any  # the model on the meta device
    mtp_modules: int = 0

    def outline(self, feature_layers: Sequence[int] = ()) -> TransformersModel:
        return self._wrapped(self.meta_model, feature_layers)

    def load(self, device: str | torch.device, feature_layers: Sequence[int] = (), progress: bool = False) -> TransformersModel:
        """ValueError names a tensor that is missing, does not fit, or holds NaN or infinity."""
        model = self._wrapped(self.load_model(device, progress), feature_layers)
        model.origin = self.path.name
        return model

    def _wrapped(self, model: Any, feature_layers: Sequence[int]) -> TransformersModel:
        from stepgraph.runtime.models.transformers_model import TransformersModel

        return TransformersModel(model, self.config, feature_layers=feature_layers)

    def load_model(self, device: str | torch.device, progress: bool) -> Any:
        kind, options = type(self.meta_model), {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        mtp_prefixes = tuple(_prefix(self.config.num_layers + index) for index in range(self.mtp_modules))  # after the model's last layer
        return _load_weights(kind, self.path, self.config.dtype, mtp_prefixes, progress, **options).to(device)


def _load_weights(kind: Any, path: Path, dtype: torch.dtype, unused: tuple[str, ...] = (), progress: bool = False, **options: Any) -> Any:
    """A model of the class `kind` from a folder, or from `state_dict` and `config` of the options. unused: prefixes of other tensors."""
    from stepgraph.runtime.models.transformers_model import PAGED_ATTENTION

    try:
        with _quiet(progress), torch.random.fork_rng(devices=[]):  # draws random values for missing tensors, which are refused below
            loaded, report = kind.from_pretrained(
                None if "state_dict" in options else path,
                **_model_options(dtype, PAGED_ATTENTION),
                **options,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{path}: {kind.__name__}: {clip_error(error)}") from error
    _check_report(path, report, unused)
    loaded.eval().requires_grad_(False)
    loaded.config.pad_token_id = None  # some models look for it in the tokens of a call, which copies them to the host
    for name, tensor in loaded.named_parameters():
        require_finite(path, name, tensor)
    return loaded


def open_transformers(path: Path, dtype: torch.dtype | None = None) -> TransformersCheckpoint:
    """Read and check everything except the weights. ValueError names the file and the field or layer."""
    if not (path / "config.json").is_file():
        raise ValueError(f"path: got {str(path)!r}, expected a local folder with a config.json for implementation='transformers'")
    if why := why_no_transformers():
        raise ValueError(f"implementation: got {TRANSFORMERS!r}, expected {NATIVE!r}: {why}")
    fields = read_json(path / "config.json")
    kind = _class_of(path, fields)
    source = SafetensorsSource(path)  # raises if the folder has no weights in this format
    try:
        config = kind.config_class.from_dict(dict(fields))
    except Exception as error:  # transformers checks some fields, with exceptions of several packages
        raise ValueError(f"{path / 'config.json'}: {kind.__name__}: {error_summary(error)}") from None
    _check_config(path, config)
    stated = config.get_text_config().dtype or torch.float32
    dtype = dtype or (getattr(torch, stated) if isinstance(stated, str) else stated)
    if dtype not in DTYPES.values():
        raise ValueError(f"{path}: config.dtype: got {clip_repr(dtype)}, expected one of {', '.join(DTYPES)}")
    meta_model, sizes = _outline(path, kind, config, dtype)
    vocabulary = Vocabulary.from_table(read_folder(path, fields, sizes.vocab_size))
    mtp_modules = count_mtp_modules(fields, source, sizes.num_layers)
    return TransformersCheckpoint(path, sizes, vocabulary, meta_model, mtp_modules)


def _outline(path: Path, kind: Any, config: Any, dtype: torch.dtype) -> tuple[Any, ModelSizes]:
    from stepgraph.runtime.models.transformers_model import INSPECTED_ATTENTION, inspect_model

    try:
        with _quiet(False), torch.device("meta"), torch.random.fork_rng(devices=[]):
            meta_model = kind._from_config(config, **_model_options(dtype, INSPECTED_ATTENTION)).eval().requires_grad_(False)
        return meta_model, inspect_model(meta_model)
    except (ValueError, KeyError, TypeError, ZeroDivisionError, RuntimeError, AssertionError) as error:
        own = isinstance(error, KeyError) and INSPECTED_ATTENTION in str(error)  # of a table of the model's own attention classes
        why = "it does not use the attention interface of transformers" if own else clip_error(error)
        raise ValueError(f"{path}: {kind.__name__}: {why}") from None


def why_no_transformers() -> str:
    return "" if importlib.util.find_spec("transformers") else "transformers is not installed: pip install 'stepgraph[transformers]'"


def _class_of(path: Path, fields: Mapping[str, Any]) -> Any:
    """The class of `transformers` that the config names. Code in the folder is never run."""
    transformers = importlib.import_module("transformers")
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names, remote = fields.get("architectures"), fields.get("auto_map")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    stated = remote.get("AutoModelForCausalLM") if isinstance(remote, dict) else remote
    # Public folders of models that transformers has adopted since still name their own file, with the same class name.
    if remote and (name not in causal or str(stated).rpartition(".")[2] != name):
        raise _refused(path, "auto_map", remote, "a class of transformers, since code in a model folder is not run")
    if name not in causal:
        raise UnsupportedConfigError(str(_refused(path, "architectures", names, "one causal language model of transformers")))
    found = getattr(transformers, name)
    if found.config_class.model_type != fields.get("model_type"):
        raise _refused(path, "model_type", fields.get("model_type"), f"{found.config_class.model_type!r} for {name}")
    return found


def _check_config(path: Path, config: Any) -> None:
    if config.is_encoder_decoder:
        raise _refused(path, "is_encoder_decoder", True, "a decoder alone")
    if quantised := getattr(config, "quantization_config", None):
        raise _refused(path, "quantization_config", quantised, "weights that are not quantised")
    text = config.get_text_config()
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in LAYER_TYPES:
            why = "the state of other layers is not one entry per token, and drafts could not be undone"
            raise ValueError(f"{path / 'config.json'}: layer_types: layer {index}: got {kind!r}, expected one of {LAYER_TYPES}: {why}")
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") in _VARYING_ROPE:
            why = "frequencies that do not depend on the length of the text, which a captured round cannot read"
            raise _refused(path, "rope_parameters.rope_type", part["rope_type"], why)


def _refused(path: Path, field: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{path / 'config.json'}: {field}: got {clip_repr(value)}, expected {expected}")


def _check_report(path: Path, report: Mapping[str, Any], unused: tuple[str, ...]) -> None:
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ValueError(f"{path}: {name}: got shape {tuple(stored)}, expected {tuple(expected)} by the config")
    for name in sorted(report["missing_keys"]):
        raise ValueError(f"{path}: {name} is missing")
    extra = sorted(name for name in report["unexpected_keys"] if not unused or not name.startswith(unused))
    if extra:
        raise ValueError(f"{path}: got {len(extra)} tensors that the config does not account for, such as {extra[0]}")
    if report["error_msgs"]:
        raise ValueError(f"{path}: {clip_repr(report['error_msgs'])}")


def _model_options(dtype: torch.dtype, attention: str) -> dict[str, Any]:
    return {"dtype": dtype, "attn_implementation": attention, "experts_implementation": _EXPERTS_IMPLEMENTATION}


@contextlib.contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Suppress messages of `transformers`, whose content is checked here, and its progress bar unless `progress`."""
    logging = importlib.import_module("transformers").utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    (logging.enable_progress_bar if progress else logging.disable_progress_bar)()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if bar else logging.disable_progress_bar)()


@dataclass(frozen=True)
class MtpCheckpoint:
    """MTP modules whose names and sizes were checked; their weights are not in memory yet."""

    path: Path
    source: SafetensorsSource
    target: TransformersCheckpoint
    layers: tuple[int, ...]  # layer numbers of the modules in the file
    meta_model: Any  # a model of one layer on the meta device: the decoder of a module
    sizes: ModelSizes
    kind: str = "MTP"
    feature_layers: tuple[int, ...] = ()
    max_positions: int | None = None  # no limit below the target's

    @property
    def max_drafts(self) -> int:
        return MAX_DRAFTS if len(self.layers) == 1 else len(self.layers)

    def outline(self, target: Llama | TransformersModel) -> TransformersMtp:
        return self._make(target, lambda layer: copy.deepcopy(self.meta_model))  # each module has weights of its own

    def load(self, target: Llama | TransformersModel, device: str | torch.device, progress: bool = False) -> TransformersMtp:
        """ValueError names a tensor that is missing, does not fit, holds NaN or infinity, or differs from the target's."""
        draft = self._make(target, lambda layer: self._load(layer, progress).to(device))
        for module, layer in zip(draft.depths, self.layers, strict=True):
            for name, parameter in _JOIN.items():
                own = module.get_parameter(parameter)
                own.copy_(read_finite(self.path, self.source, f"{_prefix(layer)}{name}", tuple(own.shape)))
            for name, repeated in _COPIES.items():
                stored = f"{_prefix(layer)}{name}"
                if stored in self.source.tensors and not torch.equal(
                    self.source.read(stored).to(target.config.dtype), getattr(target, repeated).cpu()
                ):
                    raise ValueError(f"{self.path}: {stored} differs from the target's, which MTP modules share")
        return draft

    def _make(self, target: Llama | TransformersModel, model_of: Callable[[int], Any]) -> TransformersMtp:
        from stepgraph.runtime.models.transformers_model import TransformersModel

        decoders = [TransformersModel(model_of(layer), self.sizes, name=f"draft{layer}") for layer in self.layers]
        return TransformersMtp(decoders, float(self.meta_model.config.rms_norm_eps), target.embedding, target.unembedding)

    def _load(self, layer: int, progress: bool) -> Any:
        """The decoder of a module. Its embedding and head have one token and are not used."""
        inside = {name: name.removeprefix(_prefix(layer)) for name in self.source.tensors if name.startswith(_prefix(layer))}
        names = {stored: f"model.layers.0.{name}" for stored, name in inside.items() if name not in {**_JOIN, **_COPIES, _LAST_NORM: ""}}
        names[f"{_prefix(layer)}{_LAST_NORM}"] = "model.norm.weight"
        state = {name: self.source.read(stored) for stored, name in names.items()}
        state |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), torch.zeros(1, self.sizes.hidden_size))
        try:
            return _load_weights(type(self.meta_model), self.path, self.sizes.dtype, config=self.meta_model.config, state_dict=state)
        except ValueError as error:
            raise ValueError(str(error).replace("model.layers.0.", _prefix(layer))) from None


def open_transformers_mtp(path: Path, target: TransformersCheckpoint) -> MtpCheckpoint:
    """path: the target's folder, or one with the modules only."""
    source = SafetensorsSource(path)
    layers, in_target_folder = tuple(mtp_layers(source)), path == target.path
    expected = tuple(range(target.config.num_layers, target.config.num_layers + target.mtp_modules))
    if in_target_folder and layers != expected:
        raise ValueError(f"{path}: eh_proj.weight: got it in layers {list(layers)}, expected {list(expected)}, as the config says")
    config = copy.deepcopy(target.meta_model.config)
    last = config.num_hidden_layers - 1
    lists = {name: value[last:] for name, value in vars(config).items() if name.endswith("layer_types") and isinstance(value, list)}
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": 1, "tie_word_embeddings": False}
    for name, value in {**lists, **changes, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))}.items():
        setattr(config, name, value)
    meta_model, sizes = _outline(path, type(target.meta_model), config, target.config.dtype)
    hidden = sizes.hidden_size
    shapes = {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden), _LAST_NORM: (hidden,)}
    for layer in layers:
        for name, shape in shapes.items():
            check_stored(path, source, f"{_prefix(layer)}{name}", shape)
    return MtpCheckpoint(path, source, target, layers, meta_model, sizes)


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


Target = Checkpoint | TransformersCheckpoint


def open_target(
    path: str | Path, dtype: torch.dtype | None = None, weights: WeightsMode = DEQUANTISED, implementation: Implementation = AUTO
) -> Target:
    """Read and check everything except the weights. ValueError names the file and the field, tensor or layer.

    implementation: AUTO is NATIVE if the native class implements the config, else TRANSFORMERS.
    """
    check_value("implementation", implementation, one_of((AUTO, NATIVE, TRANSFORMERS)))
    if implementation == TRANSFORMERS:
        if weights != DEQUANTISED:
            raise ValueError(f"weights: got {weights!r} with implementation={TRANSFORMERS!r}, expected {DEQUANTISED!r}")
        return open_transformers(checked_path("path", path), dtype)
    try:
        return open_checkpoint(path, dtype, weights)
    except UnsupportedConfigError as error:
        if implementation == NATIVE or weights != DEQUANTISED or not checked_path("path", path).is_dir():
            raise
        if why := why_no_transformers():
            raise ValueError(f"{error}; other models need implementation={TRANSFORMERS!r}, and {why}") from None
        return open_transformers(Path(path), dtype)
