"""A decoding runtime for PyTorch that records a whole speculative round once and replays it.

    from stepgraph import Engine
    engine = Engine.from_pretrained("model")  # a model folder, a .gguf file, or "demo"
    print(engine.generate("Once upon a time", max_new_tokens=40).text)

Requests: Engine, AsyncEngine, EngineConfig, SamplingParams, Constraint, Job. Your own model: TargetModel, DraftModel. Your own step:
stepgraph.graphs.capture. The public names are imported on first use, so `import stepgraph` does not import torch.
"""

import os
import sys
from importlib import import_module
from importlib.util import module_from_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepgraph.graphs.logits_processors import LogitsProcessor, ProcessorInput
    from stepgraph.graphs.model import DraftModel, NoCache, TargetModel
    from stepgraph.graphs.model_call import ModelInput, ModelOutput
    from stepgraph.runtime.aio import AsyncEngine, JobStream
    from stepgraph.runtime.config import EngineConfig
    from stepgraph.runtime.engine import Engine
    from stepgraph.runtime.job import FinishReason, Origin, TokenLogprob
    from stepgraph.runtime.record import Recording
    from stepgraph.runtime.request import DraftCounts, EngineClosedError, Job, StepEvent
    from stepgraph.runtime.request_queue import QueueFullError
    from stepgraph.runtime.stats import EngineStats
    from stepgraph.runtime.text import TextCodec
    from stepgraph.runtime.watchdog import RoundTimeoutError
    from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint
    from stepgraph.sampling.grammar.compile.limits import GrammarLimits
    from stepgraph.sampling.grammar.constraints.constraint import Constraint
    from stepgraph.sampling.grammar.constraints.python_types import typed_constraint
    from stepgraph.sampling.grammar.vocabulary import Vocabulary
    from stepgraph.sampling.params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "AsyncEngine",
    "CompiledConstraint",
    "Constraint",
    "DraftCounts",
    "DraftModel",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "GrammarLimits",
    "Job",
    "JobStream",
    "LogitsProcessor",
    "ModelInput",
    "ModelOutput",
    "NoCache",
    "Origin",
    "ProcessorInput",
    "QueueFullError",
    "Recording",
    "RoundTimeoutError",
    "SamplingParams",
    "StepEvent",
    "TargetModel",
    "TextCodec",
    "TokenLogprob",
    "Vocabulary",
    "typed_constraint",
]
_MODULES = {
    "AsyncEngine": "runtime.aio",
    "CompiledConstraint": "sampling.grammar.compile.compiler",
    "Constraint": "sampling.grammar.constraints.constraint",
    "DraftCounts": "runtime.request",
    "DraftModel": "graphs.model",
    "Engine": "runtime.engine",
    "EngineClosedError": "runtime.request",
    "EngineConfig": "runtime.config",
    "EngineStats": "runtime.stats",
    "FinishReason": "runtime.job",
    "GrammarLimits": "sampling.grammar.compile.limits",
    "Job": "runtime.request",
    "JobStream": "runtime.aio",
    "LogitsProcessor": "graphs.logits_processors",
    "ModelInput": "graphs.model_call",
    "ModelOutput": "graphs.model_call",
    "NoCache": "graphs.model",
    "Origin": "runtime.job",
    "ProcessorInput": "graphs.logits_processors",
    "QueueFullError": "runtime.request_queue",
    "Recording": "runtime.record",
    "RoundTimeoutError": "runtime.watchdog",
    "SamplingParams": "sampling.params",
    "StepEvent": "runtime.request",
    "TargetModel": "graphs.model",
    "TextCodec": "runtime.text",
    "TokenLogprob": "runtime.job",
    "Vocabulary": "sampling.grammar.vocabulary",
    "typed_constraint": "sampling.grammar.constraints.python_types",
}


def _prefer_installed() -> None:
    """Replace this module by the installed package if this is a checkout that was found only because it lies next to the program.

    The root of a checkout is the package, and Python searches the folder of the program before those of installed packages.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    first = os.path.abspath(sys.path[0]) if sys.path else ""
    if first != os.path.dirname(here) or not os.path.exists(os.path.join(here, "setup.py")):
        return
    found = (finder.find_spec(__name__, sys.path[1:]) for finder in sys.meta_path)
    spec = next((spec for spec in found if spec and spec.loader and spec.origin), None)
    if spec and spec.loader and not os.path.samefile(str(spec.origin), __file__):
        sys.modules[__name__] = installed = module_from_spec(spec)
        spec.loader.exec_module(installed)


_prefer_installed()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"stepgraph.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
