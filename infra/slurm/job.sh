#!/bin/bash
#SBATCH --job-name={{ job.name }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={{ job.cpus }}
{% if job.gpus %}
#SBATCH --gpus-per-node={{ job.gpus }}
{% endif %}
#SBATCH --mem={{ job.memory | mib }}M
{% if job.time %}
#SBATCH --time={{ job.time }}
{% endif %}
{% for option, value in job.placement %}
#SBATCH --{{ option }}={{ value }}
{% endfor %}
{% for directive in job.sbatch %}
#SBATCH {{ directive }}
{% endfor %}
#SBATCH --output={{ job.log }}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@{{ save_seconds + 60 }}
#SBATCH --export={{ (["HOME", "USER", "LANG"] + job.environment | list) | join(",") }}
# Trains one run on the nodes of this job. Rendered by `maskfleet launch slurm`; nothing in it is secret.
# Slurm's time limit and preemption end in SIGTERM here; the run then saves and ends with code 75, and the job is
# queued again. Any other code ends the job.
set -uo pipefail

export PATH={{ path }}{% if job.slurm_bin %}:{{ job.slurm_bin | shell }}{% endif %}

{% if job.setup %}
set +u # what follows is not written for it
. /etc/profile # for `module`
{% for line in job.setup %}
eval {{ line | shell }} || { echo "the job cannot begin: this line of --setup failed:" {{ line | shell }} >&2; exit 2; }
{% endfor %}
set -u
{% endif %}
export PATH={{ job.bin | shell }}:$PATH
{% if job.container %}
inside=(apptainer exec{{ " --nv" if job.gpus }} {{ job.container | shell }})
{% endif %}
export MASKFLEET_CPUS={{ job.cpus }} MASKFLEET_GPUS={{ job.gpus }}
export MASKFLEET_OBJECT_STORE={{ job.object_store }} MASKFLEET_JOIN_SECONDS={{ join_seconds }}
# Made here, for this start of the job; srun hands it to the other nodes, and nothing writes it down.
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN

{% include "ray_node.sh" %}

# address_of NODE: the address at which Slurm itself reaches it.
address_of() {
    local name
    name=$(scontrol show node "$1" | grep -o 'NodeAddr=[^ ]*')
    getent ahostsv4 "${name#NodeAddr=}" | awk '{ print $1; exit }'
}

# A node's own name may stand for a loopback address on it (127.0.1.1 on Debian): then it is the address from which it reaches
# another node. That is a loopback address, too, where all nodes are on one machine.
own_address() {
    local found other towards PATH=$PATH:/usr/sbin:/sbin
    found=$(address_of "$SLURMD_NODENAME")
    if [[ $found == 127.* ]] && [ "$SLURM_JOB_NUM_NODES" -gt 1 ] && command -v ip >/dev/null; then
        other=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxF "$SLURMD_NODENAME" | head -n 1)
        towards=$(ip -4 -o route get "$(address_of "$other")" 2>/dev/null | grep -o 'src [0-9.]*')
        found=${towards:+${towards#src }}
        [ -n "$found" ] || say "this node's address is unknown: its name stands for a loopback address, and no route leads to $other"
    fi
    echo "$found"
}

# A controller that is busy does not answer each time.
still_running() {
    local state
    for _ in {1..12}; do
        if state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) && [ -n "$state" ]; then
            [ "$state" = RUNNING ]
            return
        fi
        sleep 5
    done
}

# end_with CODE: Slurm queues the job again by itself if it is preempting or has lost a node; if somebody cancelled it, it must
# stay so.
end_with() {
    if [ "$1" = 75 ] && still_running; then
        say "queueing the job again: the run goes on from its checkpoint"
        requeue
    fi
    exit "$1"
}

requeue() {
    for _ in {1..12}; do
        ! scontrol requeue "$SLURM_JOB_ID" || return 0
        sleep 5
    done
    say "the job could not be queued again: run sbatch again to go on"
}

# The step of the other nodes; lines of --setup may have made others.
ray_step() { squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format='%i %j' | awk '$2 == "maskfleet-ray" { print $1; exit }'; }

finish() {
    trap '' TERM
    # The other nodes. Again and again, for a run may end before srun has made their step.
    while [ -n "${workers_pid:-}" ] && kill -0 "$workers_pid" 2>/dev/null; do
        step=$(ray_step)
        [ -z "$step" ] || scancel --quiet --signal=KILL "$step"
        sleep 0.5
    done
    [ -z "${ray_pid:-}" ] || kill -TERM "$ray_pid" 2>/dev/null
    wait
    [ -z "${ray_files:-}" ] || rm -rf "$ray_files"
}
trap finish EXIT
trap 'asked=yes; [ -z "${train_pid:-}" ] || kill -TERM "$train_pid" 2>/dev/null' TERM

head_host=$(own_address)
[ -n "$head_host" ] || exit 1
head_address=$head_host:$((20000 + SLURM_JOB_ID % 10000))
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
start_head "$head_address" || exit 1
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --job-name=maskfleet-ray --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$SLURMD_NODENAME" \
        --cpus-per-task="$MASKFLEET_CPUS"{{ " --gpus-per-node=%d" % job.gpus if job.gpus }} --export=ALL --kill-on-bad-exit=0 --wait=0 \
        bash -c "{{ "$(declare -p inside); " if job.container }}$(declare -f say start_ray answers until_ended join_head); join_head $head_address" &
    workers_pid=$!
fi

export RAY_ADDRESS=$head_address
[ -z "${asked:-}" ] || end_with 75 # asked to stop before the run began
{{ '"${inside[@]}" ' if job.container }}{{ job.command | map("shell") | join(" ") }} &
train_pid=$!
until_ended "$train_pid"
verdict $?
end_with $?
