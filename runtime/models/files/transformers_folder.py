"""A model folder for the implementation of `transformers`: checked on the meta device before its weights are loaded.

`open_target` opens any target, with the class that runs it: a native one, or that of `transformers`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepgraph.graphs.limits import Limits
from stepgraph.runtime.models.files.checkpoint import DEQUANTISED, Checkpoint, MemoryNeed, memory_need, open_checkpoint
from stepgraph.runtime.models.files.config_fields import DTYPES, MTP_COUNT, UnsupportedConfigError, count_field
from stepgraph.runtime.models.files.weights import SafetensorsSource, read_json, require_finite
from stepgraph.sampling.fields import check_value, checked_path, clip_error, clip_repr, one_of, reason
from stepgraph.sampling.grammar.tokenizers.tokenizer_json import read_folder
from stepgraph.sampling.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from stepgraph.runtime.models.transformers_model import ModelSizes, TransformersModel

AUTO, NATIVE, TRANSFORMERS = "auto", "native", "transformers"
_EXPERTS = "batched_mm"  # the one for experts that reads nothing on the host
_LAYERS = ("full_attention", "sliding_attention")
_VARYING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class TransformersCheckpoint:
    """A model of `transformers` whose config, layers and vocabulary were checked; its weights are not in memory yet."""

    path: Path
    config: ModelSizes
    vocabulary: Vocabulary
    outlined: Any  # the model on the meta device
    mtp_modules: int = 0

    def outline(self, feature_layers: Sequence[int] = ()) -> TransformersModel:
        model: TransformersModel = self.wrap("TransformersModel", self.outlined, feature_layers=feature_layers)
        return model

    def memory(self, limits: Limits) -> MemoryNeed:
        return memory_need(self.path.name, self.outline(), limits)

    def check(self, progress: bool = False) -> None:
        """The weights are checked when they are loaded."""

    def load(self, device: str | torch.device, feature_layers: Sequence[int] = (), progress: bool = False) -> TransformersModel:
        """ValueError names a tensor that is missing, does not fit, or holds NaN or infinity."""
        model: TransformersModel = self.wrap("TransformersModel", self.load_wrapped(device, progress), feature_layers=feature_layers)
        model.origin = self.path.name
        return model

    def wrap(self, kind: str, model: Any, **options: Any) -> Any:
        """A model of `transformers` as one of the classes in transformers_model."""
        return getattr(_model_module(), kind)(model, self.config, **options)

    def load_wrapped(self, device: str | torch.device, progress: bool) -> Any:
        kind, options = type(self.outlined), {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        return load_weights(kind, self.path, self.config.dtype, self.mtp_prefixes, progress, **options).to(device)

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        """Of the MTP modules' tensors: the modules are stored as layers after the model's last one."""
        return tuple(f"model.layers.{self.config.num_layers + index}." for index in range(self.mtp_modules))


def load_weights(kind: Any, path: Path, dtype: torch.dtype, unused: tuple[str, ...] = (), progress: bool = False, **options: Any) -> Any:
    """A model of the class `kind` from a folder, or from `state_dict` and `config` of the options. unused: prefixes of other tensors.

    ValueError names a tensor that is missing, does not fit, or holds NaN or infinity.
    """
    try:
        with _quiet(progress), torch.random.fork_rng(devices=[]):  # tensors that are missing, and refused below, are drawn
            loaded, report = kind.from_pretrained(
                None if "state_dict" in options else path,
                **model_options(dtype, _model_module().PAGED),
                **options,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{path}: {kind.__name__}: {clip_error(error)}") from error
    _check_report(path, report, unused)
    loaded.eval().requires_grad_(False)
    for name, tensor in loaded.named_parameters():
        require_finite(path, name, tensor)
    return loaded


def open_transformers(path: Path, dtype: torch.dtype | None = None) -> TransformersCheckpoint:
    """Read and check everything except the weights. ValueError names the file and the field or layer."""
    if not path.is_dir():
        raise ValueError(f"path: got {str(path)!r}, expected a local folder with a config.json for implementation='transformers'")
    fields = read_json(path / "config.json")
    kind = _class_of(path, fields)
    SafetensorsSource(path)  # the folder has its weights in this format
    try:
        config = kind.config_class.from_dict(dict(fields))
    except Exception as error:  # transformers checks some fields, with exceptions of several packages
        raise ValueError(f"{path / 'config.json'}: {kind.__name__}: {reason(error)}") from None
    _check_config(path, config)
    stated = config.get_text_config().dtype or torch.float32
    dtype = dtype or (getattr(torch, stated) if isinstance(stated, str) else stated)
    if dtype not in DTYPES.values():
        raise ValueError(f"{path}: config.dtype: got {clip_repr(dtype)}, expected one of {', '.join(DTYPES)}")
    outlined, sizes = outline(path, kind, config, dtype)
    vocabulary = Vocabulary.from_table(read_folder(path, fields, sizes.vocab_size))
    return TransformersCheckpoint(path, sizes, vocabulary, outlined, count_field(fields, MTP_COUNT, 64, least=0, default=0))


def outline(path: Path, kind: Any, config: Any, dtype: torch.dtype) -> tuple[Any, ModelSizes]:
    module = _model_module()
    try:
        with _quiet(False), torch.device("meta"), torch.random.fork_rng(devices=[]):
            outlined = kind._from_config(config, **model_options(dtype, module.INSPECTED)).eval().requires_grad_(False)
        return outlined, module.inspect_model(outlined)
    except (ValueError, KeyError, TypeError, ZeroDivisionError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{path}: {kind.__name__}: {clip_error(error)}") from None


def why_no_transformers() -> str:
    return "" if importlib.util.find_spec("transformers") else "transformers is not installed: pip install 'stepgraph[transformers]'"


def _model_module() -> Any:
    if why := why_no_transformers():
        raise ValueError(f"implementation: got 'transformers', expected 'native': {why}")
    return importlib.import_module("stepgraph.runtime.models.transformers_model")


def _class_of(path: Path, fields: Mapping[str, Any]) -> Any:
    """The class of `transformers` that the config names. Code in the folder is never run."""
    transformers = importlib.import_module("transformers")
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names, remote = fields.get("architectures"), fields.get("auto_map")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    stated = remote.get("AutoModelForCausalLM") if isinstance(remote, dict) else remote
    # Public folders of models that transformers has since adopted still name their file, with the same class.
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
        if kind not in _LAYERS:
            why = "the state of other layers is not one entry per token, and drafts could not be undone"
            raise ValueError(f"{path / 'config.json'}: layer_types: layer {index}: got {kind!r}, expected one of {_LAYERS}: {why}")
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


def model_options(dtype: torch.dtype, attention: str) -> dict[str, Any]:
    return {"dtype": dtype, "attn_implementation": attention, "experts_implementation": _EXPERTS}


@contextlib.contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Without the messages of `transformers`, whose content is checked here, and without its progress bar unless wanted."""
    logging = importlib.import_module("transformers").utils.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    (logging.enable_progress_bar if progress else logging.disable_progress_bar)()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if bar else logging.disable_progress_bar)()


Target = Checkpoint | TransformersCheckpoint


def open_target(path: str | Path, dtype: torch.dtype | None = None, weights: str = DEQUANTISED, implementation: str = AUTO) -> Target:
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
