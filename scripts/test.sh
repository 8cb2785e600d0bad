#!/usr/bin/env bash
# Everything that must hold before a change goes in: formatting, lints, all tests, documentation, the pure
# build, the fuzz targets, the models of the index's versions, the budget of instructions. Prints each step with
# its time and a summary; the exit code is 0 if all held.
#
#   scripts/test.sh           all of it
#   scripts/test.sh --quick   formatting, lints, the house check and the tests of the library and of tests/it;
#                             skips documentation and its tests, the pure build's tests, the example, the fuzz targets,
#                             the models, the instructions, and the tests against libzmq
#
# Needs cargo with rustfmt and clippy, a C compiler, python3 and valgrind. Installs what the tests want beyond
# that: a virtual environment below the target directory, and the Debian package python3-venv if the
# environment cannot be made without it and apt-get may be used.
#
# Long runs are in scripts/test-long.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=false
case "${1:-}" in
"") ;;
--quick) quick=true ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac

target="${CARGO_TARGET_DIR:-$PWD/target}"
mkdir -p "$target"
export CARGO_TARGET_DIR="$target"
if [[ -n "${CI:-}" || ! -t 1 ]]; then
    export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}" CARGO_TERM_PROGRESS_WHEN=never
fi
# A registry that hiccups must not fail a change.
export CARGO_NET_RETRY="${CARGO_NET_RETRY:-5}"

names=() outcomes=() seconds=()
failed=0

# step NAME COMMAND...: runs it, says how long it took, and remembers how it ended.
step() {
    local name="$1" started=$SECONDS outcome=ok
    shift
    printf '\n=== %s\n' "$name"
    "$@" || outcome="FAILED"
    [[ $outcome == ok ]] || failed=1
    names+=("$name") outcomes+=("$outcome") seconds+=($((SECONDS - started)))
    printf -- '--- %s: %s, %d s\n' "$name" "$outcome" "$((SECONDS - started))"
}

skip() {
    names+=("$1") outcomes+=("skipped (--quick)") seconds+=(0)
}

# === the steps ===

# Every step builds in the release profile and from the committed lock file, so that dependencies and
# procedural macros are built once for all of them.
fetch() {
    cargo fetch --locked && cargo fetch --locked --manifest-path tests/fuzz/Cargo.toml &&
        cargo fetch --locked --manifest-path tests/loom/Cargo.toml
}

format() {
    cargo fmt --check && cargo fmt --check --manifest-path tests/fuzz/Cargo.toml &&
        cargo fmt --check --manifest-path tests/loom/Cargo.toml
}

lint() {
    cargo clippy --release --locked --all-targets "$@" -- -D warnings
}

# No tracked file may lean on the machine or the place that it was written at. Lock files must name their
# registry. The patterns are written so that they do not match themselves.
places() {
    if [[ ! -e .git ]]; then
        echo "not a git checkout: nothing is tracked"
        return 0
    fi
    local machine='(^|[^[:alnum:]_.~])/(work|tmp|root|home)(/|"|`|$)'
    local registry='(crates[.]io|pypi[.]org|pythonhosted[.]org|registry[.]npmjs|proxy[.]golang|deb[.]debian)'
    local outside='[.][.]/shared'
    local status=0
    git grep -nIE -e "$machine" -e "$registry" -e "$outside" -- ':!*.lock' || status=$?
    # 1 is "nothing found"; more is git's own trouble.
    [[ $status == 1 ]]
}

# The tests against libzmq drive a peer in Python. The environment lies below the target directory, which git
# ignores, and is made once.
interop() {
    local venv="$target/interop-venv"
    export RANKWISE_PYTHON="$venv/bin/python"
    wanted "$RANKWISE_PYTHON" && return 0
    make_venv "$venv" || return 1
    local install=("$RANKWISE_PYTHON" -m pip install --quiet --disable-pip-version-check pyzmq msgpack)
    # Once more, since networks have bad moments.
    "${install[@]}" || { sleep 5 && "${install[@]}"; } || return 1
    wanted "$RANKWISE_PYTHON"
}

wanted() {
    [[ -x "$1" ]] && "$1" -c 'import msgpack, zmq; print("libzmq", zmq.zmq_version())'
}

make_venv() {
    python3 -m venv --clear "$1" && return 0
    if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
        echo "python3 cannot make a virtual environment; install your system's package for it (python3-venv)" >&2
        return 1
    fi
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null &&
        python3 -m venv --clear "$1"
}

documentation() {
    RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --no-deps
}

# A check links nothing, so an empty archive stands in for the fuzzer's engine and its minute of C++.
fuzz_targets() {
    local stub="$target/no-fuzzer"
    mkdir -p "$stub" && printf '!<arch>\n' >"$stub/libfuzzer.a"
    CUSTOM_LIBFUZZER_PATH="$stub/libfuzzer.a" \
        cargo check --release --locked --manifest-path tests/fuzz/Cargo.toml --bins
}

# A folder of its own, since the flag would build every dependency of the other steps anew.
models() {
    RUSTFLAGS="--cfg loom" cargo test --release --locked --target-dir "$target/loom" \
        --manifest-path tests/loom/Cargo.toml
}

step "fetch dependencies" fetch
step "formatting" format
step "no machine's paths in tracked files" places
step "clippy" lint
step "clippy, pure" lint --no-default-features
if $quick; then
    skip "python with pyzmq"
    step "tests (library, tests/it)" cargo test --release --locked --lib --bins --test it
    skip "doc tests"
    skip "tests, pure"
    skip "embedding example"
    skip "documentation"
    skip "fuzz targets"
    skip "loom"
    skip "instructions"
else
    step "python with pyzmq" interop
    step "tests (library, tests/it)" cargo test --release --locked --lib --bins --test it
    step "doc tests" cargo test --release --locked --doc
    step "tests, pure" cargo test --release --locked --no-default-features --lib
    step "embedding example" scripts/embed-example.sh
    step "documentation" documentation
    step "fuzz targets" fuzz_targets
    step "loom" models
    step "instructions" scripts/instructions.sh
fi

printf '\n%-40s %-20s %s\n' "step" "outcome" "seconds"
for i in "${!names[@]}"; do
    printf '%-40s %-20s %7d\n' "${names[i]}" "${outcomes[i]}" "${seconds[i]}"
done
printf '%-40s %-20s %7d\n' "all" "$([[ $failed == 0 ]] && echo ok || echo FAILED)" "$SECONDS"
exit "$failed"
