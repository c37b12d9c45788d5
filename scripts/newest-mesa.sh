#!/usr/bin/env bash
# Validate what only the newest Mesa can run: scripts/newest-mesa.sh [FOLDER]
#
# Makes FOLDER (default: in the user's cache) a small Debian unstable with the newest Mesa, whose CPU
# driver has cooperative matrices, puts the packages of requirements-dev.lock into it and there runs
# `tuner verify` for every family with a matrix strategy and the tests that need matrices. A whole
# folder of the last 30 days is used again. Needs root (chroot), debootstrap, and what apt and pip
# need. Exit status: 2, with the reason, if it cannot be done here, which includes a network that is
# too slow; 1 if something is wrong with a kernel.
set -Eeuo pipefail

home=~
root=$(realpath --canonicalize-missing "${1:-${XDG_CACHE_HOME:-$home/.cache}/kvtune/newest-mesa}")
cd "$(dirname "$0")/.."

readonly PACKAGES=mesa-vulkan-drivers,vulkan-validationlayers,glslang-tools,python3,python3-venv
readonly MAX_AGE_DAYS=30
readonly SPACE_MB=1500
readonly LOCK=requirements-dev.lock
# What `tuner verify` tries: kernels depend on whether there are several parts, not on how many, and
# this driver takes half a minute to compile one with large tiles.
readonly ONLY=(
  strategy=matrix strategy=matrix_lanes split=none split=count:4 subgroups={1,4,12}
  tiles_unrolled={1,2} tile_tokens={8,16}
)
readonly NOT_AGAIN='matrices_are_right' # tests that do what it does, for `make test` on a GPU
readonly VALIDATION_S=1200 # it takes 10 minutes of processor time, on two cores or more
readonly LAUNCH_TIMEOUT_S=400 # the driver compiles in the launch, and may have to share its core

say() { printf 'newest-mesa: %s\n' "$*" >&2; }
die() { say "matrix strategies NOT validated: $*"; exit 2; }

# Runs a command without input for so many seconds at most; its exit status is 124 if that ends it.
# A signal interrupts `wait`: behind a command in the foreground its trap would run when that ends.
within() {
  timeout --kill-after=10 "$@" </dev/null &
  wait "$!"
}

# --- what it needs --------------------------------------------------------------------------------

require_own_folder() {
  [[ -f $root/.system-stamp || -z $(ls -A "$root" 2>/dev/null) ]] ||
    die "$root is there and was not made by this script: name another folder"
}

require_root() {
  ((EUID == 0)) && return
  say "this makes a Debian system in a folder and runs in it, which takes root:"
  printf '\n  sudo %s %s\n\n' "scripts/newest-mesa.sh" "$root" >&2
  die "it needs root"
}

require_chroot() {
  chroot / true 2>/dev/null || die "chroot is not allowed here, even to root"
}

require_space() {
  local free
  free=$(df --output=avail --block-size=1M "$(dirname "$root")" | tail -n 1)
  ((free >= SPACE_MB)) || die "$(dirname "$root") has $free MB left, a Debian needs $SPACE_MB"
}

require_debootstrap() {
  command -v debootstrap >/dev/null && return
  command -v apt-get >/dev/null ||
    die "no debootstrap here: install it by your system's package manager, then try again"
  say "apt-get install debootstrap"
  export DEBIAN_FRONTEND=noninteractive
  local options=(--no-install-recommends --yes --quiet --quiet -o DPkg::Lock::Timeout=120)
  within 120 apt-get update --quiet --quiet >&2 || say "apt-get update failed, trying what is known"
  within 180 apt-get install "${options[@]}" debootstrap debian-archive-keyring gpg gpgv >&2 ||
    die "apt-get cannot install debootstrap: run 'apt-get install debootstrap' and see why"
}

# Starts this script again as the first process of a namespace: however that process ends, the mounts
# and processes of the namespace end with it. A container may not let it; all works without, too.
enter_own_namespace() {
  local namespace=(unshare --mount --pid --fork --kill-child --mount-proc)
  if [[ -n ${KVTUNE_OWN_NAMESPACE:-} ]] || ! "${namespace[@]}" true 2>/dev/null; then
    return 0
  fi
  KVTUNE_OWN_NAMESPACE=1 exec "${namespace[@]}" "scripts/$(basename "$0")" "$root"
}

# --- the folder -----------------------------------------------------------------------------------

# Runs a command in the folder, in the copy of the repository once that is there.
inside() {
  within "$VALIDATION_S" chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 PYTHONPATH=/kvtune \
    PATH=/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -c 'cd /kvtune && exec "$@"' sh "$@"
}

is_system_whole() {
  [[ -f $root/.system-stamp && $(<"$root/.system-stamp") == "$PACKAGES" ]] &&
    [[ -z $(find "$root/.system-stamp" -mtime "+$MAX_AGE_DAYS") ]]
}

# Made under another name, so that what has the name is whole.
make_system() {
  local made=$root.part log=$root.log
  say "debootstrap sid $root, about a minute"
  rm -rf --one-file-system "$made"
  within 420 debootstrap --variant=minbase --include="$PACKAGES" sid "$made" >"$log" 2>&1 || {
    (($? != 124)) || echo "it took more than 420 s" >>"$log"
    tail -n 20 "$log" >&2
    die "debootstrap failed (all it said: $log): is a Debian mirror within reach, and fast enough?"
  }
  rm -f "$made"/var/cache/apt/archives/*.deb
  mkdir "$made/kvtune"
  echo "$PACKAGES" >"$made/.system-stamp"
  rm -rf --one-file-system "$root"
  mv "$made" "$root"
}

# --- Python packages ------------------------------------------------------------------------------

# The lines of the lock file that its markers let through for the Python inside.
write_lock_for_inside() {
  cp "$LOCK" "$root/wheels/"
  inside /venv/bin/python -c '
from pathlib import Path
from pip._vendor.packaging.markers import Marker
for line in Path("/wheels/'"$LOCK"'").read_text().replace("\\\n", " ").splitlines():
    requirement, _, _ = line.partition(" --hash")
    _, _, marker = requirement.partition(";")
    if not line.startswith("#") and (not marker or Marker(marker).evaluate()):
        print(line)
' >"$root/wheels/requirements.lock"
}

# pip fetches for the Python inside but runs outside, where the network is set up.
fill_venv() {
  local version platforms
  [[ -x .venv/bin/python ]] || within 600 scripts/setup.sh dev || die "scripts/setup.sh dev failed"
  say "making its Python environment from $LOCK"
  rm -rf "$root"/{venv,wheels,.venv-stamp}
  mkdir "$root/wheels"
  inside python3 -m venv /venv
  version=$(inside /venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  platforms=$(inside /venv/bin/python -c '
from pip._vendor.packaging.tags import platform_tags
print(*("--platform=" + tag for tag in platform_tags()))')
  write_lock_for_inside
  # shellcheck disable=SC2086 # one word a platform
  within 300 .venv/bin/python -m pip --disable-pip-version-check -qq download --require-hashes \
    --no-deps --only-binary=:all: --python-version "$version" $platforms --dest "$root/wheels" \
    --requirement "$root/wheels/requirements.lock" >&2 ||
    die "pip gets no wheels for Python $version, which Debian unstable has now: where the network is" \
      "well, 'make lock' takes newer releases; a package without any needs a marker in pyproject.toml"
  inside /venv/bin/python -m pip --disable-pip-version-check -qq install --no-index --no-compile \
    --require-hashes --no-deps --find-links /wheels --requirement /wheels/requirements.lock
  rm -rf "$root/wheels"
  cksum <"$LOCK" >"$root/.venv-stamp"
}

is_venv_whole() {
  [[ -f $root/.venv-stamp && $(<"$root/.venv-stamp") == "$(cksum <"$LOCK")" ]]
}

copy_repository() {
  rm -rf "$root/kvtune"
  mkdir "$root/kvtune"
  tar --create --exclude-vcs --exclude='./.*_cache' --exclude=./.venv --exclude=./.hypothesis \
    --exclude=__pycache__ . | tar --extract --directory "$root/kvtune"
}

# --- what is run ----------------------------------------------------------------------------------

# pytest runs beside `tuner verify`: one takes a core, the other what is left. Returns 0, 1, or 124 if
# nothing was wrong until time was up: pytest ends at its first failure, verify names failures at once.
validate() {
  local log="$root/pytest.log" said="$root/verify.log" tests shown copy status verified=0 tested=0
  inside dpkg-query --show --showformat='${Package} ${Version}\n' mesa-vulkan-drivers
  inside python -m tuner devices
  inside python -m pytest -q -x -p no:cacheprovider -m matrices -k "not $NOT_AGAIN" \
    --require-vulkan --require-matrices --launch-timeout "$LAUNCH_TIMEOUT_S" \
    --timeout "$((2 * LAUNCH_TIMEOUT_S))" --durations=5 >"$log" 2>&1 &
  tests=$!
  say "tuner verify"
  exec {shown}> >(tee "$said")
  copy=$!
  inside python -m tuner verify --all-families "${ONLY[@]/#/--only=}" --variants values \
    --validation --launch-timeout "$LAUNCH_TIMEOUT_S" >&"$shown" 2>&1 || verified=$?
  exec {shown}>&-
  wait "$copy"
  ! grep -qE '^  (correctness|compile|runtime|timeout): ' "$said" || verified=1
  say "pytest -m matrices -k 'not $NOT_AGAIN'"
  wait "$tests" || tested=$?
  cat "$log"
  for status in "$verified" "$tested"; do
    ((status == 0 || status == 124)) || return 1
  done
  return "$((verified | tested))"
}

# --------------------------------------------------------------------------------------------------

trap 'die "line $LINENO failed: $BASH_COMMAND"' ERR
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
mkdir -p "$(dirname "$root")"
require_own_folder
require_root
require_chroot
is_system_whole || require_space
is_system_whole || require_debootstrap
enter_own_namespace
exec {lock}>"$root.lock"
flock --timeout 1200 "$lock" || die "another run has had $root for 20 minutes"
is_system_whole || make_system
[[ -z ${KVTUNE_OWN_NAMESPACE:-} ]] || mount -t proc proc "$root/proc"
is_venv_whole || fill_venv
copy_repository
trap - ERR
status=0
validate || status=$?
((status != 124)) || die "it takes this machine more than $VALIDATION_S s"
if ((status != 0)); then
  say "failed; see above"
  exit 1
fi
say "all right (lavapipe has subgroups of 8 alone: 16, 32 and 64 need a GPU)"
