#!/usr/bin/env bash
# The programs of recipes/, each in an environment of its own, against one daemon. Their packages come from PyPI into
# target/recipes. Expects `make build` to have run.
#
#   scripts/test-recipes.sh             every recipe
#   scripts/test-recipes.sh RECIPE…     some of them, by folder
#
# FORKD_TAG is the snapshot to use (default: `recipes`, which is made if it is missing). Where FORKD_URL and FORKD_TOKEN
# are set, they name the daemon. Other clients of it should be idle: what appears in the meantime counts as left behind.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=${FORKD_TEST_BIN:-$PWD/target/release}:$PATH
place=$PWD/target/recipes
log=$place/output
mkdir -p "$place"
wanted=("$@")
failed=0
step() { printf '\n==> %s\n' "$*" >&2; }

# Whether a recipe is to run, with its environment ready: recipe FOLDER OLDEST_PYTHON
recipe() {
  recipe=$1
  [ ${#wanted[@]} = 0 ] || [[ " ${wanted[*]} " == *" $recipe "* ]] || return
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
  "$environment/bin/pip" install --quiet --no-deps --force-reinstall "$place"/wheel/*.whl
}

# Runs a program of the recipe; its output must have this line: program NAME LINE
program() {
  local start=$EPOCHREALTIME verdict=ok status=0
  # CrewAI keeps files in XDG_DATA_HOME.
  (cd "recipes/$recipe" && XDG_DATA_HOME=$place/data timeout --kill-after=10 900 "$place/$recipe/bin/python" "$1") \
    >"$log" 2>&1 || status=$?
  if [ "$status" != 0 ] || ! grep -qxF -- "$2" "$log"; then
    verdict=FAILED failed=1
    cat "$log"
    echo "(exit status $status; this line was expected: $2)"
  fi
  awk -v verdict="$verdict" -v name="$recipe/$1" -v start="$start" -v end="$EPOCHREALTIME" \
    'BEGIN { printf "%-6s  %6.1f s  %s\n", verdict, end - start, name }'
}

# What the daemon has: the ids of sandboxes and the tags of snapshots, one per line.
made() {
  local print='import json, sys
for entry in json.load(sys.stdin): print(entry.get("id") or entry["tag"])'
  { forkd ls --json | python3 -c "$print" && forkd images --json | python3 -c "$print"; } | sort
}

step "The SDK and the snapshot"
rm -rf "$place/wheel"
[ -x "$place/build/bin/pip" ] || python3 -m venv "$place/build"
"$place/build/bin/pip" wheel --quiet --no-deps --wheel-dir "$place/wheel" sdk/python
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

left=$(made | comm -13 "$place/before" -)
if [ -n "$left" ]; then
  echo "FAILED: sandboxes or snapshots that were not there before the recipes:" $left
  failed=1
fi
exit "$failed"
