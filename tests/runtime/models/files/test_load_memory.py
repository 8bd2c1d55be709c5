"""A load takes little more memory than the weights that it keeps."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.helpers.c_library import needs_c
from tests.helpers.families import BASE, random_model, save
from tests.runtime.models.files.test_gguf import write
from tests.runtime.models.files.test_quantised_folder import write as write_folder

ROOT = Path(__file__).parents[4]
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
LAYERS = {"safetensors": 6}
OTHER_LAYERS = 20  # any load needs about 4 MB beside the weights, half of it at the ends of huge pages: 10% of these weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves a model with 3 million weights per layer; its name determines the format."""
    folder = tmp_path_factory.mktemp("peak")

    @functools.cache
    def path_of(name: str) -> Path:
        layers = {"num_hidden_layers": LAYERS.get(name, OTHER_LAYERS)}
        model = random_model("Llama", BASE | SIZES | layers, seed=1)
        if name.endswith(".gguf"):
            write(folder / name, "", "llama", Kind[name.removesuffix(".gguf")], model)
        elif name == "fp8":
            write_folder(folder / name, "FP8 per tensor", model)
        else:
            save(model.to(torch.bfloat16), folder / name)
        return folder / name

    return path_of


def measured(path: Path, weights: str, copies: int = 1, implementation: str = "native") -> float:
    """Peak memory divided by the bytes of the kept weights."""
    command = [sys.executable, "-m", "tests.helpers.load_peak", str(path), weights, str(copies), implementation]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT, check=True)
    peak, kept = map(int, result.stdout.split())
    return peak / kept


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        pytest.param("safetensors", "dequantised", marks=pytest.mark.slow),
        pytest.param("Q4_1.gguf", "dequantised", marks=pytest.mark.soak),
        pytest.param("Q4_1.gguf", "quantised", marks=[needs_c, pytest.mark.slow]),
        pytest.param("Q8_0.gguf", "quantised", marks=[needs_c, pytest.mark.soak]),
        pytest.param("fp8", "quantised", marks=[needs_c, pytest.mark.soak]),
    ],
)
def test_a_load_takes_at_most_a_fifth_more_than_the_weights(saved: Callable[[str], Path], name: str, weights: str) -> None:
    assert 0.9 < measured(saved(name), weights) <= 1.2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.soak
def test_a_load_by_transformers_takes_at_most_a_fifth_more_than_the_weights(saved: Callable[[str], Path]) -> None:
    assert 0.9 < measured(saved("safetensors"), "dequantised", implementation="transformers") <= 1.2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.slow
def test_a_second_copy_is_measured(saved: Callable[[str], Path]) -> None:
    assert measured(saved("safetensors"), "dequantised", copies=2) > 1.9
