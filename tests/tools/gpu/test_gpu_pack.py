"""tools/gpu_pack.py with a small index: a bundle installs, and a damaged one does not."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import gpu_pack
from tools.gpu.packing import bundle

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def wheel(folder: Path, name: str, tag: str = "py3-none-any") -> None:
    """A wheel of one module with a NAME."""
    folder.mkdir(exist_ok=True)
    paths = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"NAME = {name!r}\n")
        archive.writestr(f"{paths}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n")
        archive.writestr(f"{paths}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{paths}/RECORD", "")


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of pure wheels, one platform wheel, a model in three parts and a prebuilt library."""
    wheel(tmp_path / "index", "everywhere")
    wheel(tmp_path / "index", "there", "cp312-abi3-manylinux_2_28_x86_64")
    wheel(tmp_path / "index", "flashinfer_python")
    (tmp_path / "wheels.txt").write_text("# three\neverywhere==1.0\nthere==1.0  # only there\nflashinfer-python==1.0\n")
    (tmp_path / "model.gguf").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "prebuilt" / "0.6.6" / "page").mkdir(parents=True)
    (tmp_path / "prebuilt" / "0.6.6" / "page" / "page.so").write_bytes(b"\x7fELF")
    monkeypatch.setattr(bundle, "PART_BYTES", 1000)
    out = tmp_path / "bundle"
    # parts are smaller than a wheel: only models are split
    monkeypatch.setattr(bundle, "MAX_WHEEL_BYTES", 10_000)
    paths = [str(tmp_path / name) for name in ("wheels.txt", "index", "model.gguf", "prebuilt")]
    flags = [f"{flag}={value}" for flag, value in zip(("--wheels", "--index", "--model", "--libraries"), paths, strict=True)]
    assert gpu_pack.main([f"--out={out}", *flags]) == 0
    return out


def test_bundle_installs(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    assert [name for name in manifest["files"] if name.endswith(".whl")] == [
        "wheels/everywhere-1.0-py3-none-any.whl",
        "wheels/flashinfer_jit_cache-1.0-py3-none-linux_x86_64.whl",
        "wheels/flashinfer_python-1.0-py3-none-any.whl",
        "wheels/there-1.0-cp312-abi3-manylinux_2_28_x86_64.whl",
    ]
    assert manifest["joined"]["model.gguf"]["parts"] == [f"parts/model.gguf.{number:03d}" for number in range(3)]
    check = subprocess.run([sys.executable, "install.py", "--check"], cwd=packed, capture_output=True, text=True, check=False)
    assert (check.returncode, check.stdout) == (0, "every file is intact\n")

    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "site"))
    if sys.version_info < (3, 12) or not sys.platform.startswith("linux"):  # one of the wheels is for another platform
        wrong = subprocess.run([sys.executable, str(packed / "install.py")], capture_output=True, text=True, check=False)
        assert wrong.returncode == 1 and "there-1.0" in wrong.stderr
        (packed / "wheels" / "there-1.0-cp312-abi3-manylinux_2_28_x86_64.whl").unlink()
        del manifest["files"]["wheels/there-1.0-cp312-abi3-manylinux_2_28_x86_64.whl"]
        (packed / "manifest.json").write_text(json.dumps(manifest))
    assert gpu_pack.main([f"--install={packed}"]) == 0
    assert "everywhere" in (tmp_path / "site" / "everywhere.py").read_text()
    assert (packed / "model.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()
    # as FlashInfer does: equal version, one folder per library
    script = "import flashinfer_jit_cache as it; print(it.__version__, it.get_jit_cache_dir())"
    site = {"PYTHONPATH": str(tmp_path / "site")}
    version, folder = subprocess.run([sys.executable, "-c", script], env=site, capture_output=True, text=True, check=True).stdout.split()
    assert version == "1.0" and (Path(folder) / "page" / "page.so").read_bytes() == b"\x7fELF"


def test_damaged_bundle_is_reported_and_not_installed(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "site"))
    part = packed / "parts" / "model.gguf.001"
    part.write_bytes(b"x" + part.read_bytes()[1:])
    (packed / "wheels" / "everywhere-1.0-py3-none-any.whl").unlink()
    (packed / "parts" / "model.gguf.002").write_bytes(b"")
    assert gpu_pack.main([f"--install={packed}"]) == 1
    paths = capsys.readouterr().err
    assert "parts/model.gguf.001: checksum differs from the manifest" in paths
    assert "wheels/everywhere-1.0-py3-none-any.whl: missing" in paths
    assert "parts/model.gguf.002: got 0 bytes, expected 560" in paths
    assert not (tmp_path / "site").exists() and not (packed / "model.gguf").exists()


def test_bad_input_is_refused_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wheels.txt").write_text("torch>=2\n")
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, expected in (
        ([f"--wheels={tmp_path / 'wheels.txt'}"], "wheels.txt:1: got 'torch>=2', expected name==version"),
        ([f"--model={tmp_path / 'none.gguf'}"], "none.gguf, expected a file that is there"),
        ([f"--libraries={tmp_path / 'none'}"], "none, expected a folder that is there"),
        ([f"--wheels={tmp_path / 'none.txt'}", f"--libraries={tmp_path / 'full'}"], "got 0 .so files and 0 flashinfer-python to pack"),
    ):
        assert gpu_pack.main([f"--out={tmp_path / 'bundle'}", *arguments]) == 1
        assert expected in capsys.readouterr().err
    assert gpu_pack.main([f"--out={tmp_path / 'full'}"]) == 1
    assert "which is not empty, expected a new or empty folder" in capsys.readouterr().err
    assert gpu_pack.main([f"--install={tmp_path / 'full'}"]) == 1
    assert "got no manifest.json" in capsys.readouterr().err


def test_packages_of_the_host_are_not_packed(tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text("Typing_Extensions==4.1\nnumpy\npip @ file:///x\n\n")
    pins = ["numpy==2.4.6", "typing-extensions==4.16.0", "xgrammar==0.2.8"]
    assert bundle.without_installed(pins, tmp_path / "there.txt") == ["xgrammar==0.2.8"]
    assert bundle.without_installed(pins, None) == pins


def test_wheels_match_the_pinned_versions() -> None:
    """Packed versions equal the versions of the test environment."""
    pins = dict(line.split("==") for line in bundle.read_pins(bundle.WHEELS))
    assert pins["flashinfer-python"] == "0.6.6"
    assert len(pins) == len(bundle.read_pins(bundle.WHEELS))
    assert {"xgrammar", "apache-tvm-ffi", "llguidance", "pytest"} <= set(pins) and "torch" not in pins
    assert pins["xgrammar"].startswith("0.2.") and pins["llguidance"].startswith("1.9.")
