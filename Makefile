# The two commands that matter: `make demo` and `make test`.

GUEST_TARGET := x86_64-unknown-linux-gnu
GUEST_BINARY := target/guest/$(GUEST_TARGET)/release/forkd-guest

# Where rustup puts cargo: shells know it only after the next login.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help setup build dist demo test test-e2b test-recipes lint advisories soak clean

help: ## Show this help
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1	\2/p' Makefile

setup: ## Install what this machine lacks (asks apt)
	@scripts/setup.sh

build: setup ## Build the release binaries into target/release
	cargo build --release --locked
	# The guest runs on any image: it is linked statically, which needs flags and a folder of its own.
	RUSTFLAGS='-C target-feature=+crt-static -C strip=symbols' cargo build --release --locked \
		-p forkd-guest --target $(GUEST_TARGET) --target-dir target/guest
	@cmp -s $(GUEST_BINARY) target/release/forkd-guest || install -m 755 $(GUEST_BINARY) target/release/forkd-guest

dist: setup ## Build what a release ships into target/dist: programs, SDKs (slow)
	cargo build --profile dist --locked -p forkd-cli -p forkd-vmm
	RUSTFLAGS='-C target-feature=+crt-static -C strip=symbols' cargo build --profile dist --locked \
		-p forkd-guest --target $(GUEST_TARGET) --target-dir target/guest
	install -m 755 target/guest/$(GUEST_TARGET)/dist/forkd-guest target/dist/forkd-guest
	scripts/dist-sdks.sh target/dist

demo: build ## Run the main job, with times
	@python3 scripts/demo.py

test: build ## Run all tests, formatting and clippy
	@scripts/test.sh

test-e2b: build ## E2B's clients in several versions, and its code interpreter (PyPI, npm)
	@scripts/test-e2b.sh

test-recipes: build ## The programs of recipes/ with the frameworks they are for (PyPI)
	@scripts/test-recipes.sh

lint: ## Formatting, clippy, dependencies
	cargo fmt --all --check
	@scripts/layers.py
	@scripts/words.py
	@scripts/versions.py
	cargo clippy --release --locked --workspace --all-targets -- -D warnings
	cargo clippy --release --locked --workspace --test guest --test host -- -D warnings
	@if command -v cargo-deny >/dev/null; then cargo deny --offline check licenses bans sources; \
	else echo "NOT RUN: cargo deny (not installed; cargo install cargo-deny)"; fi
	@echo "NOT RUN: advisories (make advisories needs the network)"

advisories: ## Look up known vulnerabilities of the dependencies (needs the network)
	@command -v cargo-deny >/dev/null || { echo "cargo-deny is missing: cargo install --locked cargo-deny" >&2; exit 1; }
	cargo deny check advisories

soak: dist ## Run the long campaigns (fuzzing and more) on target/dist; results go to bench/RESULTS.md
	@scripts/soak.sh

clean: ## Remove what was built (the data directory stays)
	cargo clean
