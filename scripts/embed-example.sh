#!/usr/bin/env bash
# Builds and runs the README's embedding example as a crate of its own, with no dependency but those that the
# README names: what a reader gets who copies both. Shares the target directory and the lock file's versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}"
crate="$target/embed-example"
mkdir -p "$crate/src"

# block LANGUAGE: the first code block of this language in the section on embedding.
block() {
    awk -v fence="\`\`\`$1" '
        /^## / { inside = ($0 == "## Embedding") }
        inside && $0 == fence { copying = 1; next }
        copying && /^```/ { exit }
        copying { print }' README.md
}

{
    printf '[package]\nname = "embed-example"\nversion = "0.0.0"\nedition = "2024"\npublish = false\n\n[workspace]\n\n'
    block toml
    printf '\n[patch.crates-io]\nrankwise = { path = "%s" }\n' "$PWD"
} >"$crate/Cargo.toml"
# `# ` hides a line from whoever reads the documentation, not from the compiler.
block rust | sed -E 's/^# ?//' >"$crate/src/main.rs"
[[ -s "$crate/src/main.rs" ]] || { echo "README.md has no embedding example" >&2; exit 1; }

cp Cargo.lock "$crate/Cargo.lock"
CARGO_TARGET_DIR="$target" cargo run ${EMBED_PROFILE---release} --manifest-path "$crate/Cargo.toml"
