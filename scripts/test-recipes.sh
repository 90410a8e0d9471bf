#!/usr/bin/env bash
# The programs of recipes/, each in an environment of its own, and of examples/typescript, against one daemon. Their
# packages come from PyPI into target/recipes, and from npm; the SDKs from scripts/dist-sdks.sh. Expects `make build` to
# have run.
#
#   scripts/test-recipes.sh             all of them
#   scripts/test-recipes.sh NAME…       some: folders of recipes/, and `typescript`
#
# FORKD_TAG is the snapshot to use (default: `recipes`, which is made if it is missing). Where FORKD_URL and FORKD_TOKEN
# are set, they name the daemon.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=${FORKD_TEST_BIN:-$PWD/target/release}:$PATH
place=$PWD/target/recipes
log=$place/output
mkdir -p "$place"
wanted=("$@")
failed=0
step() { printf '\n==> %s\n' "$*" >&2; }

wants() { [ ${#wanted[@]} = 0 ] || [[ " ${wanted[*]} " == *" $1 "* ]]; }

# Whether a recipe is to run, with its environment ready: recipe FOLDER OLDEST_PYTHON
recipe() {
  recipe=$1
  wants "$recipe" || return
  if ! python3 -c "import sys; sys.exit(sys.version_info < ($2))"; then
    echo "NOT RUN: recipes/$recipe: its packages need Python ${2/, /.} or later, and python3 is $(python3 --version)"
    return 1
  fi
  prepare || { echo "FAILED: the environment of recipes/$recipe" && failed=1 && return 1; }
}

# The environment of the recipe. Its steps are one list: a function that is a condition does not end at an error.
prepare() {
  local requirements=recipes/$recipe/requirements.txt environment=$place/$recipe
  if ! cmp -s "$requirements" "$environment/requirements.txt"; then
    step "Packages of $recipe"
    rm -rf "${environment:?}" && python3 -m venv "$environment" &&
      "$environment/bin/pip" install --quiet --no-deps --only-binary :all: -r "$requirements" &&
      cp "$requirements" "$environment/" || return
  fi
  "$environment/bin/pip" install --quiet --no-deps --force-reinstall "$place"/sdks/*.whl
}

# Runs a program of the recipe; its output must have this line: program NAME LINE
program() {
  runs "recipes/$recipe" "$1" "$2" "$place/$recipe/bin/python"
}

# runs FOLDER PROGRAM LINE INTERPRETER
runs() {
  local start=$EPOCHREALTIME verdict=ok status=0
  # CrewAI keeps files in XDG_DATA_HOME.
  (cd "$1" && XDG_DATA_HOME=$place/data timeout --kill-after=10 900 "$4" "$2") >"$log" 2>&1 || status=$?
  if [ "$status" != 0 ] || ! grep -qxF -- "$3" "$log"; then
    verdict=FAILED failed=1
    cat "$log"
    echo "(exit status $status; this line was expected: $3)"
  fi
  awk -v verdict="$verdict" -v name="$1/$2" -v start="$start" -v end="$EPOCHREALTIME" \
    'BEGIN { printf "%-6s  %6.1f s  %s\n", verdict, end - start, name }'
}

# The TypeScript SDK where the examples find it.
prepare_typescript() {
  npm install --silent --no-audit --no-fund --no-save --prefix examples/typescript "$place"/sdks/forkd-sdk-*.tgz
}

# The sandboxes and snapshots that stem from the snapshot, one per line.
made() {
  forkd tree --json | python3 -c 'import json, sys
nodes = json.load(sys.stdin)["nodes"]
parents = {node["id"]: node.get("parent") for node in nodes}
for node in nodes:
    above = node["id"] if not node["gone"] else None
    while above := parents.get(above):
        if above == "snapshot:" + sys.argv[1]:
            print(node["name"])' "$FORKD_TAG" | sort
}

step "The SDK and the snapshot"
scripts/dist-sdks.sh "$place/sdks" >"$log"
export FORKD_TAG=${FORKD_TAG:-recipes}
forkd snapshot-info "$FORKD_TAG" >"$log" 2>&1 ||
  forkd snapshot --tag "$FORKD_TAG" --image python --warm-python 'import json'
if [ -z "${FORKD_URL:-}" ]; then
  FORKD_URL=$(forkd token print --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["url"])')
  FORKD_TOKEN=$(forkd token print)
  export FORKD_URL FORKD_TOKEN
fi
made >"$place/before"

step "The recipes"
if recipe langgraph "3, 10"; then
  program fan_out.py "chosen: Estimate with the median."
  program checkpoints.py "open, from the same moment: 7"
fi
if recipe crewai "3, 10"; then
  program agents.py "lead: least often used"
fi
if recipe autogen "3, 10"; then
  program conversation.py "in the first sandbox: [9, 11, 10, 12, 8, 500]"
fi
if recipe openai-agents "3, 10"; then
  program handoff.py "the planner's sandbox: {'ada': 30, 'bob': 12}"
  program swarm.py "archivist: All is archived."
fi
if recipe mcp-agent "3, 10"; then
  program agent.py "the best of three: sorted; lines after the rollback: 1000"
fi
if recipe coding-agent-fork "3, 9"; then
  program three_fixes.py "best fix: rewrite"
fi

if wants typescript; then
  step "The TypeScript examples"
  if ! command -v npm >/dev/null || ! node -e 'process.exit(process.versions.node.split(".")[0] < 18 ? 1 : 0)'; then
    echo "NOT RUN: examples/typescript: they need Node.js 18 or later and npm (apt install npm)"
  elif ! prepare_typescript; then
    echo "FAILED: the packages of examples/typescript" && failed=1
  else
    runs examples/typescript tree_search.mjs "best: drop times, sort, drop repeats: 700 bytes become 25" node
    runs examples/typescript undo.mjs "kept: take the discount off" node
    runs examples/typescript parallel_tests.mjs "4 tests in 3 sandboxes, 1 failed" node
  fi
fi

left=$(made | comm -13 "$place/before" -)
if [ -n "$left" ]; then
  echo "FAILED: left behind:" $left
  failed=1
fi
exit "$failed"
