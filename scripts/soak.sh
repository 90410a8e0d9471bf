#!/usr/bin/env bash
# Long campaigns. Today: coverage-guided fuzzing of the device models and the protocol parsers, with the
# same bodies `make test` runs over their corpora. A summary to paste into bench/RESULTS.md is printed.
#
#   FORKD_FUZZ_SECS=600 make soak     seconds for each target (default 300)
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FORKD_FUZZ_SECS:-300}
command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked

# cargo-fuzz asks for a nightly compiler only because of unstable flags; the stable one has them too.
export RUSTC_BOOTSTRAP=1
summary=$(mktemp)
trap 'rm -f "$summary"' EXIT
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

printf '\n| fuzz target | time | executions | crashes |\n|---|---|---|---|\n'
cat "$summary"
