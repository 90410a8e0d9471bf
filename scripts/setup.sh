#!/usr/bin/env bash
# Installs what building, testing and running forkd needs and this machine lacks. Asks apt only when
# something is missing, so a second run takes no time.
set -euo pipefail

# command:package, each with its user.
needed=(
    cc:build-essential                    # Rust links with it
    make:build-essential
    qemu-system-x86_64:qemu-system-x86    # the emulated machine, where there is no KVM
    mmdebstrap:mmdebstrap                 # images from packages
    fakeroot:fakeroot                     # images without root
    mke2fs:e2fsprogs                      # disks
    pip3:python3-pip                      # images with packages of PyPI
    npm:npm                               # images with packages of npm
    ip:iproute2                           # network slots
    nft:nftables                          # network slots
    python3:python3                       # the demo, the tests
    curl:curl                             # the examples in README.md
    openssl:openssl                       # certificates for tests
)
# Images from packages without root need to map user ids.
if [ "$(id -u)" -ne 0 ]; then needed+=(newuidmap:uidmap); fi
rust_minimum=1.90

# Users often have no sbin in their path, and that is where some of these live.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else die "this needs root, and there is no sudo; run as root: $*"
    fi
}

apt_install() {
    local options=(-y -qq --no-install-recommends)
    say "installing with apt: $*"
    # Lists may be old, or missing as in a fresh container.
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install "${options[@]}" "$@" >/dev/null 2>&1 && return
    as_root apt-get update -qq || say "apt-get update failed; trying with the lists there are"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install "${options[@]}" "$@" >/dev/null ||
        die "apt could not install them; its message is above"
}

# The version of a package that apt could install; nothing if there is none.
apt_candidate() {
    { apt-cache policy "$1" 2>/dev/null || true; } | sed -n 's/^ *Candidate: \([0-9].*\)/\1/p'
}

missing_packages() {
    local entry
    for entry in "${needed[@]}"; do
        command -v "${entry%%:*}" >/dev/null || printf '%s\n' "${entry#*:}"
    done
    # The tests install clients into an environment of their own.
    python3 -c 'import ensurepip, venv' 2>/dev/null || printf 'python3-venv\n'
    # For everything that is downloaded over TLS.
    [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -d /etc/pki/tls ] || printf 'ca-certificates\n'
}

# The version of cargo, as "1.95"; nothing if there is none that works.
cargo_version() { { cargo --version 2>/dev/null || true; } | sed -n 's/^cargo \([0-9]*\.[0-9]*\).*/\1/p'; }

# Whether version $1 is at least version $2.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

rust_is_new_enough() {
    local version
    version=$(cargo_version)
    [ -n "$version" ] && at_least "$version" "$rust_minimum"
}

ensure_rust() {
    PATH=$PATH:${HOME:-/root}/.cargo/bin
    rust_is_new_enough && return
    if command -v apt-get >/dev/null && ! command -v rustup >/dev/null; then
        as_root apt-get update -qq || say "apt-get update failed; trying with the lists there are"
        # Debian 12 has no rustup; the toolchain it builds browsers with is kept new.
        local web
        web=$(apt_candidate cargo-web)
        if [ -n "$web" ] && at_least "$web" "$rust_minimum"; then
            apt_install cargo-web rustc-web rustfmt-web rust-web-clippy
        elif [ -n "$(apt_candidate rustup)" ]; then
            apt_install rustup
            say "installing the stable Rust toolchain with rustup"
            rustup default stable >/dev/null
        fi
        # The shell remembers where programs were.
        hash -r
        rust_is_new_enough && return
    fi
    if [ -n "$(cargo_version)" ]; then say "cargo $(cargo_version) is too old: forkd needs $rust_minimum or newer"
    else say "there is no cargo: forkd needs Rust $rust_minimum or newer"
    fi
    if command -v rustup >/dev/null; then die "get it with: rustup default stable && rustup update stable"; fi
    die "get it from https://rustup.rs, then run this again"
}

[ "$(uname -sm)" = "Linux x86_64" ] || die "forkd runs on Linux on x86_64, and this is $(uname -sm)"

mapfile -t packages < <(missing_packages | sort -u)
if [ "${#packages[@]}" -gt 0 ]; then
    command -v apt-get >/dev/null ||
        die "this system has no apt. Install what these packages hold on Debian, then run this again: ${packages[*]}"
    apt_install "${packages[@]}"
    mapfile -t packages < <(missing_packages | sort -u)
    [ "${#packages[@]}" -eq 0 ] || die "still missing after the installation: ${packages[*]}"
fi
ensure_rust
