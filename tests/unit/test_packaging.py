"""A wheel, and the editable install, from the repository's root and from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import weightsync, weightsync._native, weightsync.adapters.vllm.plugin as plugin
from weightsync.digest import digest_bytes
digest_bytes(b"12345678", seed=1)
from weightsync.device.kernels import sources
if list(sources()) != ["digest.cu", "digest.h", "digest_kernel.h"]:
    print("CUDA sources", list(sources()))
try:
    import adapters
    print("top-level adapters")
except ImportError:
    print("fine")
"""


@pytest.fixture(scope="module")
def wheel_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own wheel, unpacked into a directory of its own."""
    built, installed = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(built), "."]
    subprocess.run(build, cwd=ROOT, check=True, timeout=280)
    (wheel,) = built.glob("weightsync-*.whl")
    install = [*pip, "install", "--quiet", "--no-deps", "--target", str(installed), str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    return installed


@pytest.mark.parametrize("cwd", [ROOT, Path("/")], ids=["root", "elsewhere"])
def test_the_wheel_has_all_it_needs(wheel_directory: Path, cwd: Path) -> None:
    # -S leaves the editable install out; what the wheel depends on is added by hand.
    paths = [str(wheel_directory), *(p for p in sys.path if p.endswith("site-packages"))]
    done = subprocess.run(
        [sys.executable, "-S", "-c", CODE],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0 and done.stdout.strip() == "fine", done.stdout + done.stderr
    for file in ("py.typed", "_native.pyi", "adapters/vllm/backend.py"):
        assert (wheel_directory / "weightsync" / file).exists()
    for file in ("digest.cu", "digest.h", "digest_kernel.h"):
        shipped = wheel_directory / "weightsync" / "device" / "csrc" / file
        assert shipped.read_bytes() == (ROOT / "csrc" / file).read_bytes()
    (metadata,) = wheel_directory.glob("weightsync-*.dist-info")
    entry_points = (metadata / "entry_points.txt").read_text()
    assert "vllm.general_plugins" in entry_points and "vllm.logits_processors" in entry_points


@pytest.mark.parametrize("cwd", [ROOT, Path("/")], ids=["root", "elsewhere"])
def test_the_editable_install_has_all_it_needs(cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip() == "fine", done.stdout + done.stderr
