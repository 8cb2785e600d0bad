#!/usr/bin/env bash
# The regression gate: instructions per block and per query of a fixed small workload, counted by valgrind and
# compared with the budget in benches/instructions.json. Prints a table; half a minute and the build.
#
#   scripts/instructions.sh           exit code 1 when a measure is more than 3 % over its budget, and by how much
#   scripts/instructions.sh --write   makes the budget anew: commit it with the change that earned or cost it
#
# Exit code 2 when nothing could be counted: needs valgrind (your system's package of that name). The budget
# says which compiler made it; with another one the counts move a little, and the table says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
"" | --write) ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 2
    ;;
esac
if ! command -v valgrind >/dev/null; then
    echo "valgrind is missing: install your system's package \`valgrind\`" >&2
    exit 2
fi

# Run by its path, since cargo hides its exit code.
program="$(cargo bench --locked --no-default-features --bench index_instructions --no-run --message-format=json |
    sed -n 's/.*"name":"index_instructions".*"executable":"\([^"]*\)".*/\1/p')"
if [[ ! -x $program ]]; then
    echo "the bench could not be built" >&2
    exit 2
fi
exec "$program" "$@"
