#!/usr/bin/env bash
# Builds the comparison with the peers' indexes and runs it: one table of ratios, goals beside them.
#
#   scripts/rivals.sh [--quick] [--json FILE] [--trace FILE] [--ten-million]
#
# The peers live in a crate of its own (benches/rivals), so this needs the package registry once. Everything else
# that it takes is a Rust toolchain; instruction counts need valgrind and are left out, with a note, without it.
# Exits 1 if rankwise gave a wrong answer anywhere.
set -euo pipefail
# Files named by the user are looked up from where the user is.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target/rivals}
# Not --locked: when rankwise gains a dependency, the peers' versions stay and only that one is added.
cargo build --release --manifest-path "$root/benches/rivals/Cargo.toml" >&2
exec "$CARGO_TARGET_DIR/release/rivals" "$@"
