#!/usr/bin/env bash
# Long campaigns: children by the thousand with kills in the middle, over and over; branches whose saver,
# daemon or machine is killed at random moments; load; the API fuzzed; an upgrade; and coverage-guided
# fuzzing of the device models and the parsers, with the same bodies `make test` runs over their corpora. A summary to paste into
# bench/RESULTS.md is printed.
#
#   FORKD_FUZZ_SECS=600 make soak       seconds for each fuzz target (default 300)
#   FORKD_FORK_ROUNDS=50 make soak      rounds of forking and killing (default 20)
#   FORKD_LOAD_SECS=600 make soak       seconds of load by FORKD_LOAD_CLIENTS (default 300, by 200)
#   FORKD_PREVIOUS=REF make soak        the build that is upgraded from (default: the last tag, or HEAD~1)
#   FORKD_TEST_BIN=/DIR scripts/soak.sh the binaries under test (default: target/dist, which `make dist` builds)
#   FORKD_BRANCH_ROUNDS=1000 make soak  kills of savers, and as many of daemons; a tenth of it power cuts
#                                       (half a minute each) and branches in a row (default 200)
set -euo pipefail
cd "$(dirname "$0")/.."
export FORKD_TEST_BIN=${FORKD_TEST_BIN:-$PWD/target/dist}
seconds=${FORKD_FUZZ_SECS:-300}
rounds=${FORKD_FORK_ROUNDS:-20}
for round in $(seq "$rounds"); do
  printf '\n==> forking and killing, round %s of %s\n' "$round" "$rounds"
  cargo test --release --locked -q --workspace --test host -- --test-threads=1 fanout::
done

branches=${FORKD_BRANCH_ROUNDS:-200}
# With at least as many as a disk has layers, so that those are merged on the way.
few=$((branches / 10 < 20 ? 20 : branches / 10))
kills=$(mktemp)
summary=$(mktemp)
trap 'rm -f "$kills" "$summary"' EXIT
campaign() {
  FORKD_BRANCH_ROUNDS=$1 cargo test --release --locked -q --workspace --test host -- \
    --test-threads=1 --nocapture "$2" 2>&1 | tee -a "$kills"
}
printf '\n==> savers and daemons killed while branches are written, %s times each\n' "$branches"
campaign "$branches" kills::
printf '\n==> a random process killed, 100 times\n'
campaign 100 faults::
printf '\n==> many clients at once\n'
FORKD_LOAD_SECS=${FORKD_LOAD_SECS:-300} FORKD_LOAD_CLIENTS=${FORKD_LOAD_CLIENTS:-200} campaign 1 load::
FORKD_LOAD_SECS=${FORKD_LOAD_SECS:-300} FORKD_LOAD_CLIENTS=8 scripts/test.sh guest --nocapture load:: 2>&1 | tee -a "$kills"
printf '\n==> the API, fuzzed from its document\n'
FORKD_SCHEMA_SECS=${FORKD_SCHEMA_SECS:-600} campaign 1 schema::
printf '\n==> the previous build upgraded to this one\n'
previous=${FORKD_PREVIOUS:-$(git describe --tags --abbrev=0 2>/dev/null || git rev-parse HEAD~1)}
git worktree prune
git worktree add --force --detach target/previous "$previous"
(cd target/previous && cargo build --release --locked --target-dir ../previous-build)
install -m 755 "$FORKD_TEST_BIN/forkd-guest" target/previous-build/release/
FORKD_PREVIOUS_BIN=$PWD/target/previous-build/release campaign 1 upgrade::
git worktree remove --force target/previous
printf '\n==> the plug of a machine pulled while branches are written, %s times\n' "$few"
campaign "$few" power::
printf '\n==> %s branches in a row of a Linux guest that writes\n' "$few"
FORKD_BRANCH_ROUNDS=$few scripts/test.sh guest branch_consistency::

command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked

# cargo-fuzz asks for a nightly compiler only because of unstable flags; the stable one has them too.
export RUSTC_BOOTSTRAP=1
for target in $(cargo fuzz list); do
  printf '\n==> fuzzing %s for %s s\n' "$target" "$seconds"
  log=$(mktemp)
  # New inputs go to a scratch folder: the corpus in the tree stays small, and is read only.
  scratch=$(mktemp -d)
  if ! cargo fuzz run --sanitizer none "$target" "$scratch" "fuzz/corpus/$target" -- \
      -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 >"$log" 2>&1; then
    tail -n 60 "$log"
    echo "fuzzing $target failed; the input is under fuzz/artifacts/$target" >&2
    exit 1
  fi
  executed=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  echo "| $target | $seconds s | ${executed:-?} | none |" | tee -a "$summary"
  rm -rf "$log" "$scratch"
done

printf '\n| killed while branches were written | rounds | what became of the snapshots |\n|---|---|---|\n'
sed -n 's/^.*campaign: //p' "$kills"
printf '\n| fuzz target | time | executions | crashes |\n|---|---|---|---|\n'
cat "$summary"
