#!/usr/bin/env bash
# Runs the tests, natively and with Linux guests: on this host's KVM where it runs Linux, else inside the
# emulated machine. Expects `make build` to have run.
#
#   scripts/test.sh                 everything
#   scripts/test.sh native          unit tests, tiny guests, fuzz bodies over their corpora
#   scripts/test.sh guest [NAME…]   Linux guests (tests/guest); NAME selects tests as cargo test does
#   scripts/test.sh host            the daemon on this host and the emulated machine (tests/host)
#   scripts/test.sh list LOG…       what did not run, by logs of the above
#
# FORKD_TEST_BIN is the absolute folder of the binaries under test (default: target/release).
# `linux` and `outside` are the old names of `guest` and `host`.
set -euo pipefail
cd "$(dirname "$0")/.."
export FORKD_TEST_BIN=${FORKD_TEST_BIN:-$PWD/target/release}
forkd=$FORKD_TEST_BIN/forkd
if [ "$(id -u)" = 0 ]; then default=/var/lib/forkd; else default=${XDG_DATA_HOME:-$HOME/.local/share}/forkd; fi
export FORKD_DATA_DIR=${FORKD_DATA_DIR:-$default}
log=$(mktemp)
trap 'rm -f "$log" "$log".*' EXIT
step() { printf '\n==> %s\n' "$*" >&2; }

# Where cargo put a test's executable.
executable() {
  cargo test --release --locked --no-run --workspace --test "$1" --message-format=json |
    python3 -c 'import json,sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == sys.argv[1]: print(message["executable"])' "$1" | tail -n 1
}

native() {
  step "Native tests"
  cargo test --release --locked --workspace 2>&1 | tee -a "$log"
}

# Brings everything the tests stand on: image, kernel and, if need be, the machine.
prepare() {
  "$forkd" run --image python -- true
}

guest() {
  local test uses
  test=${guest_test:-$(executable guest)}
  uses=$("$forkd" doctor --json | python3 -c 'import json,sys; print(json.load(sys.stdin)["will_use"])')
  if [ "$uses" = kvm ]; then
    step "Linux guests, on this host's KVM"
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo --preserve-env=FORKD_DATA_DIR,FORKD_TEST_BIN,FORKD_BRANCH_ROUNDS,FORKD_LOAD_SECS,FORKD_LOAD_CLIENTS)
    "${as_root[@]}" "$test" --test-threads=2 "$@" 2>&1 | tee -a "$log"
  else
    step "Linux guests, inside the emulated machine (KVM here does not run Linux)"
    local before
    before=$(machine_restarts)
    if ! in_machine "$test" "$@"; then
      # An emulated machine may hang; its watchdog replaces it. That is not the tests' failure.
      [ "$(machine_restarts)" != "$before" ] || return 1
      step "THE MACHINE HUNG OR DIED AND WAS REPLACED: running the guest tests once more"
      "$forkd" machine start
      in_machine "$test" "$@"
    fi
  fi
}

machine_restarts() {
  "$forkd" machine status --json | python3 -c 'import json,sys; print(json.load(sys.stdin).get("running", {}).get("restarts"))'
}

# Runs a test's executable inside the machine, with the binaries it tests.
in_machine() {
  local test=$1 name status=0
  shift
  # Under a name never used before, and copied once more inside, where it stays for the next group: the
  # machine sees the host's files through a share, which is slow to run programs from.
  name=tests-$(cat "$test" "$FORKD_TEST_BIN"/forkd{,-vmm,-guest} | sha256sum | cut -c1-16)
  mkdir -p "$FORKD_DATA_DIR/machine/bin/$name"
  cp "$test" "$FORKD_DATA_DIR/machine/bin/$name/guest-tests"
  cp "$FORKD_TEST_BIN"/forkd{,-vmm,-guest} "$FORKD_DATA_DIR/machine/bin/$name/"
  # A test that hangs must not hang everything.
  # shellcheck disable=SC2016
  timeout --kill-after=10 1500 "$forkd" machine shell -- env FORKD_TEST_LIBRARY=/forkd-share \
    FORKD_BRANCH_ROUNDS="${FORKD_BRANCH_ROUNDS:-}" FORKD_LOAD_SECS="${FORKD_LOAD_SECS:-}" \
    FORKD_LOAD_CLIENTS="${FORKD_LOAD_CLIENTS:-}" sh -c '
    name=$1; shift
    if ! [ -d "/run/$name" ]; then
      rm -rf /run/tests-*
      cp -r "/forkd-share/machine/bin/$name" "/run/$name.part"
      mv "/run/$name.part" "/run/$name"
    fi
    FORKD_TEST_BIN=/run/$name exec "/run/$name/guest-tests" --test-threads=1 "$@"
  ' sh "$name" "$@" 2>&1 | tee -a "$log" || status=$?
  rm -rf "${FORKD_DATA_DIR:?}/machine/bin/$name"
  return "$status"
}

# Runs something with a second machine, which has the images and kernels of the first.
another_machine() (
  first=$FORKD_DATA_DIR
  export FORKD_DATA_DIR=$first/second-machine
  rm -rf "$FORKD_DATA_DIR"
  mkdir "$FORKD_DATA_DIR"
  trap '"$forkd" machine stop || true; rm -rf "$FORKD_DATA_DIR"' EXIT
  cp -al "$first/images" "$first/kernels" "$FORKD_DATA_DIR/"
  "$@"
)

# Runs groups of guest tests until none is left.
guest_groups() {
  local group status=0
  prepare || return
  while group=$(next_group); do
    # shellcheck disable=SC2086
    guest $group || status=$?
  done
  return "$status"
}

# Takes the next group. The lock keeps the other runner from taking the same one.
next_group() {
  # shellcheck disable=SC2016
  flock "$log.lock" sh -c '[ -s "$1" ] && head -n 1 "$1" && sed -i 1d "$1"' sh "$log.groups"
}

host() {
  step "The daemon on this host, and the emulated machine"
  "$(executable host)" --test-threads=1 2>&1 | tee -a "$log"
}

others() {
  host && guest_groups
}

# The guest tests in groups of some minutes; those of a group share a warmed parent. The last group has the tests
# of all modules that no other group names. A name selects every test that contains it: no module's name may end
# with that of another.
groups() {
  local named=(branch_consistency:: "branch_and_rollback:: layers:: pause::" "api:: streams:: workspaces::"
    "forks:: hazards:: limits:: load::" "devices:: exit::" "run:: fork_isolation::")
  printf '%s\n' "${named[@]}"
  # shellcheck disable=SC2048,SC2086
  printf -- '--skip=%s ' ${named[*]}
  echo
}

# Lists what did not run, by what these logs have.
list() {
  cat "$@" | grep -o 'NOT RUN: .*' | sort -u || echo "nothing: every test ran"
}

what=${1:-all}
shift || true
case $what in
  all)
    # Looked up once: cargo would wait for the builds below.
    guest_test=$(executable guest)
    groups >"$log.groups"
    # A machine is one emulated CPU: the tests inside it have one core, all others the other, with a second
    # machine for those that need one. The runner that finishes the others takes groups from the first.
    (nice make lint && nice cargo test --release --locked --workspace --no-run && native &&
      prepare && another_machine others) >"$log.others" 2>&1 &
    others=$!
    status=0
    guest_groups || status=$?
    wait "$others" || status=$?
    cat "$log.others"
    [ "$status" = 0 ] || exit "$status"
    ;;
  guest | linux) prepare && guest "$@" ;;
  host | outside) host "$@" ;;
  native) native "$@" ;;
  list) list "$@"; exit ;;
  *) echo "unknown: $what (native, guest, host or list)" >&2; exit 2 ;;
esac

step "Not run"
# All of them: `make lint` and what else ran beside the guest tests have a log of their own.
list "$log"*
