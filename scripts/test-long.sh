#!/usr/bin/env bash
# What takes longer than a change should wait: the oldest compiler, fuzzing, the models of the index's versions
# and its stress test with more rounds, the live cases that take minutes, and the property tests with many more
# cases. Not in CI; run it before a release and report its summary.
#
#   scripts/test-long.sh [MINUTES]   how long to go on, 30 unless told; builds, models and stress come on top
#
# Half of the time goes to the fuzz targets in turn, half to the property tests. A property test that the
# clock stops has not failed, and the summary says so. Corpora and findings stay below the target directory.
#
# RANKWISE_HISTORIES (200000) and PROPTEST_CASES (20000) set the property tests' sizes, RANKWISE_STRESS_ROUNDS
# (50) the stress test's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

minutes="${1:-30}"
if ! [[ $minutes =~ ^[1-9][0-9]*$ ]]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
fi
export RANKWISE_HISTORIES="${RANKWISE_HISTORIES:-200000}" PROPTEST_CASES="${PROPTEST_CASES:-20000}"
target="${CARGO_TARGET_DIR:-$PWD/target}"
mkdir -p "$target"
export CARGO_TARGET_DIR="$target"
[[ -t 1 ]] || export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}" CARGO_TERM_PROGRESS_WHEN=never

summary=()
failed=0

# note NAME STATUS SECONDS DETAIL: one line of the summary. 124 is the clock's.
note() {
    local outcome=ok
    case "$2" in
    0) ;;
    124) outcome="stopped by the clock" ;;
    *) outcome="FAILED ($2)" failed=1 ;;
    esac
    summary+=("$(printf '%-28s %-22s %6d s   %s' "$1" "$outcome" "$3" "$4")")
}

# === the oldest compiler that Cargo.toml promises ===

oldest="$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)"
toolchain="$(rustup toolchain list 2>/dev/null | grep -om1 "^${oldest//./[.]}[.-][^ ]*" || true)"
if [[ -n $toolchain ]]; then
    printf '\n=== check with Rust %s\n' "$oldest"
    started=$SECONDS status=0
    rustup run "$toolchain" cargo check --locked --target-dir "$target/oldest" || status=$?
    note "Rust $oldest" "$status" $((SECONDS - started)) "cargo check"
else
    summary+=("Rust $oldest: not checked (rustup toolchain install $oldest --profile minimal)")
fi

# === fuzzing ===

mapfile -t fuzzers < <(sed -n '/^\[\[bin\]\]/,/^$/s/^name = "\(.*\)"$/\1/p' tests/fuzz/Cargo.toml)
fuzz_seconds=$((minutes * 30 / ${#fuzzers[@]}))
host="$(rustc -vV | sed -n 's/^host: //p')"
toolchain_fuzzes() {
    command -v cargo-fuzz >/dev/null && rustc --version | grep -q nightly
}

# Stable compilers can count edges and comparisons too, only without a sanitizer. Little is missed: `unsafe` is
# in one file, src/index/published.rs, which hostile bytes reach as hashes and counts alone. The flags reach the
# code under test only because a target is named.
build_stable() {
    local flags=(
        -Cpasses=sancov-module
        -Cllvm-args=-sanitizer-coverage-level=4
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
        -Cllvm-args=-sanitizer-coverage-pc-table
        -Cllvm-args=-sanitizer-coverage-trace-compares
        -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks --cfg=fuzzing
    )
    RUSTFLAGS="${flags[*]}" cargo build --release --locked --target "$host" \
        --target-dir "$target/fuzz-build" --manifest-path tests/fuzz/Cargo.toml --bins
}

run_fuzzer() {
    local name="$1" corpus="$target/fuzz-corpus/$1" found="$target/fuzz-findings/$1/"
    mkdir -p "$corpus" "$found"
    local options=(-max_total_time="$fuzz_seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536
        -artifact_prefix="$found" -print_final_stats=1)
    if toolchain_fuzzes; then
        cargo fuzz run --fuzz-dir tests/fuzz "$name" "$corpus" -- "${options[@]}"
    else
        "$target/fuzz-build/$host/release/$name" "$corpus" "${options[@]}"
    fi
}

if ! toolchain_fuzzes; then
    build_stable
fi
for fuzzer in "${fuzzers[@]}"; do
    printf '\n=== fuzz %s, %d s\n' "$fuzzer" "$fuzz_seconds"
    started=$SECONDS status=0
    log="$target/fuzz-$fuzzer.log"
    run_fuzzer "$fuzzer" >"$log" 2>&1 || status=$?
    [[ $status == 0 ]] || tail -40 "$log"
    runs="$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")"
    edges="$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)"
    note "fuzz $fuzzer" "$status" $((SECONDS - started)) "${runs:-?} runs, ${edges:-?} edges covered"
done

# === the index beside its readers ===

printf '\n=== models\n'
started=$SECONDS status=0
changes=3
# Unset, loom tries every order.
env -u LOOM_MAX_PREEMPTIONS RUSTFLAGS="--cfg loom" RANKWISE_LOOM_CHANGES=$changes \
    cargo test --release --locked --target-dir "$target/loom" --manifest-path tests/loom/Cargo.toml || status=$?
note "loom" "$status" $((SECONDS - started)) "$changes changes, every order"

printf '\n=== stress\n'
cargo test --release --locked --no-run
rounds="${RANKWISE_STRESS_ROUNDS:-50}"
started=$SECONDS status=0
RANKWISE_STRESS_ROUNDS="$rounds" cargo test --release --locked --test it -- index_stress || status=$?
note "stress" "$status" $((SECONDS - started)) "$rounds rounds"

# === live cases ===

# The Python that scripts/test.sh makes, unless another is named.
export RANKWISE_PYTHON="${RANKWISE_PYTHON:-$target/interop-venv/bin/python}"
if "$RANKWISE_PYTHON" -c 'import msgpack, zmq' 2>/dev/null; then
    printf '\n=== live cases that take minutes\n'
    started=$SECONDS status=0
    cargo test --release --locked --test it -- --ignored --test-threads 1 live_cases:: || status=$?
    note "live cases" "$status" $((SECONDS - started)) "the long ones"
else
    unset RANKWISE_PYTHON
    summary+=("live cases: not run (scripts/test.sh makes the Python that they need)")
fi

# === property tests ===

# Built above, before the clock starts.
started=$SECONDS
for suite in "--lib" "--test it"; do
    printf '\n=== property tests, %s\n' "$suite"
    left=$((minutes * 30 - (SECONDS - started)))
    [[ $left -gt 0 ]] || left=1
    begun=$SECONDS status=0
    # shellcheck disable=SC2086 # two words on purpose
    timeout "$left" cargo test --release --locked $suite -- --include-ignored --skip live_cases:: || status=$?
    note "tests $suite" "$status" $((SECONDS - begun)) "$RANKWISE_HISTORIES histories, $PROPTEST_CASES cases"
done

printf '\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
