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

export PATH=/usr/local/bin:/usr/bin:/bin
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

# The address at which Slurm itself reaches this node; a loopback address, of a cluster on one machine, is as good as any.
own_address() {
    local name
    name=$(scontrol show node "$SLURMD_NODENAME" | grep -o 'NodeAddr=[^ ]*')
    getent ahostsv4 "${name#NodeAddr=}" | awk '{ print $1; exit }'
}

still_running() { [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; }

finish() {
    trap '' TERM
    # The other nodes. Again and again, for a run may end before srun has made their step.
    while [ -n "${workers_pid:-}" ] && kill -0 "$workers_pid" 2>/dev/null; do
        scancel --quiet --signal=KILL "$SLURM_JOB_ID.0"
        sleep 0.5
    done
    [ -z "${ray_pid:-}" ] || kill -TERM "$ray_pid" 2>/dev/null
    wait
    [ -z "${ray_files:-}" ] || rm -rf "$ray_files"
}
trap finish EXIT
trap 'asked=yes; [ -z "${train_pid:-}" ] || kill -TERM "$train_pid" 2>/dev/null' TERM

head_address=$(own_address):$((20000 + SLURM_JOB_ID % 10000)) || exit 1
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
start_head "$head_address" || exit 1
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$SLURMD_NODENAME" \
        --cpus-per-task="$MASKFLEET_CPUS"{{ " --gpus-per-node=%d" % job.gpus if job.gpus }} --export=ALL --kill-on-bad-exit=0 --wait=0 \
        bash -c "{{ "$(declare -p inside); " if job.container }}$(declare -f say start_ray answers until_ended join_head); join_head $head_address" &
    workers_pid=$!
fi

export RAY_ADDRESS=$head_address
{{ '"${inside[@]}" ' if job.container }}{{ job.command | map("shell") | join(" ") }} &
train_pid=$!
until_ended "$train_pid"
verdict $?
code=$?

# Slurm queues the job again by itself if it is preempting or has lost a node; if somebody cancelled it, it must stay so.
if [ "$code" = 75 ] && still_running; then
    say "queueing the job again: the run goes on from its checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
