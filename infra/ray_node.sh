# Ray on one node of a job that starts Ray itself (Slurm, AWS Batch). Included or sourced, not run.
# With MASKFLEET_METRICS_PORT, the node's figures are there for Prometheus; else at a free port that Ray takes.
# The job sets MASKFLEET_CPUS, MASKFLEET_GPUS, MASKFLEET_OBJECT_STORE (bytes), MASKFLEET_JOIN_SECONDS and RAY_AUTH_TOKEN.
# Where `inside` is set, an array, it comes before every command of Ray: what runs it in a container.
# shellcheck shell=bash

[ -n "${inside+set}" ] || inside=()
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # a node is ended only when training on it has
export RAY_worker_niceness="${RAY_worker_niceness:-0}" # ranks are as urgent as the job: Ray's own default is 15
export RAY_prestart_worker_first_driver=0 # else the driver waits for a worker on each core, for ever if one dies
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 # a driver without a GPU of its own still sees the node's

ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)" # Ray opens many files

say() { printf '%s %s: %s\n' "$(date -u +%FT%TZ)" "$(hostname)" "$*" >&2; }

# start_ray ARGUMENTS: a node of the Ray cluster, in the background. Sets ray_pid, and ray_files, a private folder.
# `--block`, so that the node is one process of this job: `ray stop` would end the Ray of other jobs on the machine too.
start_ray() {
    ray_files=$(mktemp -d /tmp/mf.XXXXXX) # short: it holds Unix sockets, whose paths end at 107 characters
    ${inside[@]+"${inside[@]}"} ray start --block --temp-dir="$ray_files" --include-log-monitor=false --dashboard-agent-listen-port=0 \
        ${MASKFLEET_METRICS_PORT:+--metrics-export-port="$MASKFLEET_METRICS_PORT"} \
        --num-cpus="$MASKFLEET_CPUS" --num-gpus="$MASKFLEET_GPUS" \
        --object-store-memory="$MASKFLEET_OBJECT_STORE" "$@" >"$ray_files/start.log" 2>&1 &
    ray_pid=$!
}

# start_head HOST:PORT: the first node. Fails, with Ray's own words, if it does not come up.
start_head() {
    start_ray --head --node-ip-address="${1%:*}" --port="${1##*:}" --include-dashboard=false
    until answers "$1"; do
        if ! kill -0 "$ray_pid" 2>/dev/null || [ "$SECONDS" -gt "$MASKFLEET_JOIN_SECONDS" ]; then
            say "Ray did not start as the head at $1:"
            cat "$ray_files/start.log" >&2
            return 1
        fi
        sleep 1
    done
    say "Ray is up at $1"
}

# join_head HOST:PORT: any other node. If its Ray ends while the head answers, it joins again: a run of a fixed number of ranks
# would wait for it in vain. Stays until the head is gone. Fails, and says so, if it cannot join.
# SIGTERM does not end it: the ranks on this node are needed for the checkpoint that the driver is making meanwhile.
join_head() {
    trap 'say "asked to end; staying until the run has saved"' TERM
    until answers "$1"; do
        if [ "$SECONDS" -gt "$MASKFLEET_JOIN_SECONDS" ]; then
            say "no Ray head answers at $1 after $SECONDS s"
            return 1
        fi
        sleep 1
    done
    local code pause=5
    while :; do
        start_ray --address="$1"
        until_ended "$ray_pid"
        code=$?
        say "this node's Ray ended with code $code"
        [ "$code" = 0 ] || tail -n 40 "$ray_files/start.log" >&2
        rm -rf "$ray_files"
        answers "$1" || return "$code"
        sleep "$pause"
        pause=$((pause < 300 ? 2 * pause : pause))
    done
}

answers() { ${inside[@]+"${inside[@]}"} ray health-check --address="$1" >/dev/null 2>&1; }

# until_ended PID: waits through signals that have a trap; returns the process's exit code, which bash remembers.
until_ended() {
    wait "$1"
    while kill -0 "$1" 2>/dev/null; do
        wait "$1"
    done
    wait "$1"
}

# verdict CODE: the job's exit code, when `maskfleet train` has ended with CODE. Finished (0) and asked to stand still (3)
# are final, and so is a mistake (2), unless the job was being stopped (asked=yes), which may look like one. Anything else
# has said nothing about the run, a kill for instance: 75, try again.
verdict() {
    say "maskfleet train ended with code $1"
    case "$1" in
    0 | 3) return "$1" ;;
    2) [ "${asked:-}" = yes ] || return 2 ;;
    esac
    return 75
}
