#!/usr/bin/env bash
# Builds the packages of the SDKs: wheel and source distribution of sdk/python, npm tarball of sdk/typescript. The tools
# come from PyPI and npm into target/packages; the folders in sdk/ are not changed.
#
#   scripts/packages.sh [FOLDER]    FOLDER gets the packages (default: target/dist)
set -euo pipefail
cd "$(dirname "$0")/.."
to=${1:-target/dist}
work=$PWD/target/packages
mkdir -p "$to" "$work"
to=$(cd "$to" && pwd)
step() { printf '\n==> %s\n' "$*" >&2; }

# A copy of a folder of sdk/ without what builds and tests leave in it.
copy() {
  rm -rf "${work:?}/$1"
  mkdir "$work/$1"
  tar -C "sdk/$1" --exclude=node_modules --exclude=dist --exclude=build --exclude=__pycache__ --exclude='*.egg-info' \
    --exclude='.[a-z]*' -cf - . | tar -C "$work/$1" -xf -
  cp LICENSE NOTICE "$work/$1/"
}

if [ -e sdk/python/pyproject.toml ]; then
  step "Python: wheel and source distribution"
  copy python
  if ! [ -e "$work/venv/ready" ]; then
    rm -rf "${work:?}/venv"
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet build hatchling
    touch "$work/venv/ready"
  fi
  rm -f "$to"/forkd_sdk-*.whl "$to"/forkd_sdk-*.tar.gz
  (cd "$work/python" && "$work/venv/bin/python" -m build --no-isolation --outdir "$to" . >&2)
fi

if [ -e sdk/typescript/package.json ]; then
  step "TypeScript: npm tarball"
  copy typescript
  rm -f "$to"/forkd-sdk-*.tgz
  (cd "$work/typescript" && npm ci --no-audit --no-fund --silent && npm pack --silent --pack-destination "$to" >&2)
fi
ls -l "$to"/forkd_sdk-* "$to"/forkd-sdk-* >&2
