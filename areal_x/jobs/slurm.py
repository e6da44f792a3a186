"""The job as a batch script of Slurm.

    first node:   this script ─▶ ray start --head        the others:   srun ─▶ ray start
                     └─▶ the run, which is the driver

Slurm runs a batch script on the first node of the job, so the run is a child of the script: signals
reach it once, and its exit status is the script's. In a step, as with `ray symmetric-run`, it could
not stop in order: Slurm signals the task of each node itself, that is Ray and not the run, and
srun, when it is told to end, kills all processes of its step.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from areal_x.cluster.config import ROLE
from areal_x.cluster.connection import SETTINGS
from areal_x.jobs.job import ATTEMPTS, PORT, Group, Job

GRACE_SECONDS = 120  # from the warning to the end of the time limit
SECONDS_TO_END = 20  # for Ray
NODE = "python -m areal_x.cluster.node"

# why: "stop" if the job is cancelled or preempted, "time" if its time is nearly over, "lost" if a node
# of Ray is. The first signal counts: a second one would end the run at once.
SIGNALS = f"""\
run='' why='' token=''
stop() {{
    [ -z "$why" ] || return 0
    why=$1
    [ -z "$run" ] || kill -TERM "$run" 2> /dev/null
}}
trap 'stop stop' TERM INT
trap 'stop time' USR1
trap 'stop lost' USR2
end() {{
    trap '' TERM INT USR1 USR2
    [ -z "$token" ] || rm -f "$token"
    kill $(jobs -p) 2> /dev/null
    for _ in {{1..{SECONDS_TO_END}}}; do [ -n "$(jobs -rp)" ] && sleep 1; done
}}
trap end EXIT
"""
RUN = """\
# The run. It repeats itself from its newest checkpoint, whenever Slurm starts this script again.
if [ -z "$why" ]; then
    {command} &
    run=$!
    [ -z "$why" ] || kill -TERM "$run" 2> /dev/null  # the signal came just now
fi
status=143
while [ -n "$run" ]; do
    wait "$run"
    status=$?  # of the run, or of a signal that this script got meanwhile
    kill -0 "$run" 2> /dev/null || run=''
done
end
trap - EXIT
# Ended by a signal that this script did not pass on, as for want of memory
[ -n "$why" ] || [ "$status" -le 128 ] || why=lost
if [ "$status" != 0 ]; then
    case $why in
        time) scontrol requeue "$SLURM_JOB_ID" ;;
        lost) [ "${{SLURM_RESTART_COUNT:-0}}" -ge {attempts} ] || scontrol requeue "$SLURM_JOB_ID" ;;
    esac
fi
exit "$status"
"""
CLUSTER = """\
# A token for Ray, which only you can read
token=$PWD/.ray-token-$SLURM_JOB_ID
rm -f "$token"  # of an attempt that was killed
(umask 077; set -C; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > "$token") || exit 1
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token
unset RAY_AUTH_TOKEN
# The address of this node, as the last node sees it
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
address={address}
case $address in
    *:*) export RAY_ADDRESS="[$address]:{port}" ;;
    *) export RAY_ADDRESS="$address:{port}" ;;
esac
# Ray, on all nodes. If one loses it, the run ends and the job is put into the queue again.
{head} &
ray=$!
{others}\
(while {all_live}; do sleep 2; done; kill -USR2 $$) 2> /dev/null &
"""


def slurm(job: Job) -> str:
    """Returns the batch script."""
    with_ray = job.nodes > 1 or any(job.roles)
    parts = ["\n".join([*header(job), "set -uo pipefail", ""]), SIGNALS]
    if job.setup:
        parts.append(f"{job.setup}\n")
    parts.append('ulimit -n "$(ulimit -Hn)"\n')
    parts += [f"export {name}={value}\n" for name, value in SETTINGS.items()]
    command = job.command()
    if not with_ray:
        parts.append("unset RAY_ADDRESS  # the run starts Ray itself\n")
    else:
        parts.append(cluster(job))
        command = f"{NODE} after {job.nodes} {command}"
    parts.append(RUN.format(command=command, attempts=ATTEMPTS))
    return "".join(parts)


def header(job: Job) -> Iterator[str]:
    """Yields the options of the job."""
    yield "#!/bin/bash"
    yield f"#SBATCH --job-name={job.name}"
    yield f"#SBATCH --nodes={job.nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    if job.gpus:
        yield f"#SBATCH --gpus-per-node={job.gpus}"
    yield "#SBATCH --exclusive"
    yield "#SBATCH --mem=0"  # all of a node's
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --signal=B:USR1@{GRACE_SECONDS}"


def cluster(job: Job) -> str:
    """Returns the commands that start Ray on all nodes of the job."""
    first, *rest = job.groups()
    alone = job.nodes == 1
    head = [NODE, "after 0 ray start --head --block", '--node-ip-address "$address"']
    head += [f"--port {PORT}", *options(job, first)]
    beside = [Group(first.role, 1, first.count - 1)] if first.count > 1 else []
    others = [*beside, *rest]
    names = [f"others_{number}" for number in range(1, 1 + len(others))]
    started = [f"{worker(job, x)} &\n{y}=$!\n" for x, y in zip(others, names, strict=True)]
    return CLUSTER.format(
        address="127.0.0.1" if alone else f"$({NODE} address \"${{hosts##*$'\\n'}}\") || exit 1",
        port=PORT,
        head=" ".join(head),
        others="".join(started),
        all_live=" && ".join(f'kill -0 "${name}"' for name in ("ray", *names)),
    )


def worker(job: Job, group: Group) -> str:
    """Returns the command that starts Ray on further nodes: a step of one task a node, which sees
    all of its CPUs and GPUs."""
    step = f"srun --nodes={group.count} --ntasks={group.count} --relative={group.first}"
    own = "--export=ALL --input=none --cpu-bind=none --kill-on-bad-exit=1"
    start = f'{NODE} after 1 ray start --block --address "$RAY_ADDRESS"'
    return " ".join([step, own, start, *options(job, group)])


def options(job: Job, group: Group) -> list[str]:
    """Returns the options of `ray start` that describe a node."""
    found = [f"--num-gpus {job.gpus}"] if job.gpus else []
    found += [f"--num-cpus {job.cpus}"] if job.cpus else []
    return found + ([f"--labels {shlex.quote(f'{ROLE}={group.role}')}"] if group.role else [])
