# Shared by quickstart and test: a virtual environment in .venv with the pinned packages. Sourced, not run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf '\nerror: %s\n  remedy: %s\n' "$1" "$2" >&2
    exit 1
}

# Prints the first Python of at least 3.11 with the venv module.
find_python() {
    local candidate seen=""
    for candidate in python3.11 python3.12 python3.13 python3; do
        command -v "$candidate" >/dev/null || continue
        seen="$seen $candidate"
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        "$candidate" -c 'import ensurepip, venv' 2>/dev/null || {
            fail "$candidate cannot create virtual environments" \
                "on Debian: apt-get install python3-venv"
        }
        echo "$candidate"
        return
    done
    fail "no Python 3.11 or newer on the path (found:${seen:- none})" \
        "on Debian: apt-get install python3 python3-venv"
}

# setup EXTRA: installs Maskfleet, with the extra unless it is empty, into .venv, unless a stamp says it is there.
# Leaves the seconds it took in $install_seconds. Libraries are compiled meanwhile: `compiled` waits for that.
setup() {
    local extra=$1 python pins stamp started quiet=(-qq)
    [ ! -t 1 ] || quiet=() # on a terminal, pip shows its progress
    install_seconds=0
    pins=$(cat "$root/infra/constraints.txt" "$root/pyproject.toml" | sha256sum | cut -c1-16)
    stamp=$root/.venv/installed${extra:+-$extra}-$pins
    [ -e "$stamp" ] && return
    python=$(find_python)
    started=$SECONDS
    say "installing into .venv ($("$python" --version), versions from infra/constraints.txt); this takes some minutes"
    [ -x "$root/.venv/bin/python" ] || "$python" -m venv "$root/.venv"
    (cd "$root" && .venv/bin/python -m pip install "${quiet[@]}" --disable-pip-version-check --no-compile \
        -c infra/constraints.txt -e ".${extra:+[$extra]}")
    # pip would compile on one core, for a third of its time.
    "$root/.venv/bin/python" -m compileall -qq -j 0 -x 'site-packages/.*/tests?/' "$root/.venv/lib" &
    compiling=$!
    touch "$stamp" "$root/.venv/installed-$pins"
    install_seconds=$((SECONDS - started))
    say "installed in $install_seconds s; its libraries are being compiled, which takes up to a minute"
}

# Waits until what `setup` installed is compiled. Libraries hold templates that are no Python: these stay as they are.
compiled() {
    local began=$SECONDS
    [ -z "${compiling:-}" ] || wait "$compiling" || true
    install_seconds=$((install_seconds + SECONDS - began))
}
