#!/usr/bin/env bash
# Pin every package with its hashes: requirements.lock to run, requirements-dev.lock to test.
# Run with Python 3.11, the oldest supported, in an environment that has pip-tools.
set -euo pipefail
cd "$(dirname "$0")/.."

# No address of a package index may reach the files, so that they work with any.
export CUSTOM_COMPILE_COMMAND="make lock"
options=(--quiet --generate-hashes --allow-unsafe --strip-extras --no-annotate
  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options)

# The build requirements are pinned too: the package itself is installed without build isolation.
python3 -m piptools compile "${options[@]}" "$@" --build-deps-for editable \
  --output-file requirements.lock pyproject.toml
python3 -m piptools compile "${options[@]}" "$@" --build-deps-for editable --extra dev \
  --constraint requirements.lock --output-file requirements-dev.lock pyproject.toml
