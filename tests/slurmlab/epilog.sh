#!/bin/bash
# proctrack/linuxproc tracks processes by their parent, so it loses those whose
# parent died (say, the workers of a torchrun that was killed), where
# proctrack/cgroup would still end them.  This script makes up for that.  It runs
#   as TaskEpilog, when one task of a step ended: that task's left-overs;
#   as Epilog, when a job ended on a node: whatever is left of the job there.
# What belongs to a task or job is told by the environment of the processes.
me=$$
if [ "$SLURM_SCRIPT_CONTEXT" = epilog_task ]; then
    # not for the batch script: when that ends the job ends, and Epilog comes
    case ${SLURM_STEP_ID:-} in ''|*[!0-9]*) exit 0 ;; esac
    [ "${#SLURM_STEP_ID}" -lt 9 ] || exit 0
fi
shopt -s nullglob
for dir in /proc/[0-9]*; do
    pid=${dir#/proc/}
    [ "$pid" = "$me" ] || [ "$pid" = "$PPID" ] && continue
    job= node= conf= step= rank= label=
    while IFS= read -r -d '' kv; do            # builtins only: this forks nothing
        case $kv in
            SLURM_JOB_ID=*) job=${kv#*=} ;;
            SLURMD_NODENAME=*) node=${kv#*=} ;;
            SLURM_CONF=*) conf=${kv#*=} ;;
            SLURM_STEP_ID=*) step=${kv#*=} ;;
            SLURM_PROCID=*) rank=${kv#*=} ;;
            SLURM_SCRIPT_CONTEXT=*) label=script ;;
        esac
    done 2>/dev/null < "$dir/environ"
    [ "$job" = "$SLURM_JOB_ID" ] && [ "$node" = "$SLURMD_NODENAME" ] && [ -z "$label" ] || continue
    [ "$conf" = @RUN@/etc/slurm.conf ] || [ -z "$conf" ] || continue
    if [ "$SLURM_SCRIPT_CONTEXT" = epilog_task ]; then
        [ "$step" = "$SLURM_STEP_ID" ] && [ "$rank" = "$SLURM_PROCID" ] || continue
    fi
    comm=
    read -r comm 2>/dev/null < "$dir/comm"
    case $comm in slurm*) continue ;; esac
    kill -KILL "$pid" 2>/dev/null &&
        printf '%(%FT%T)T job %s step %s node %s: killed left-over pid %s (%s)\n' -1 \
            "$job" "${step:-batch}" "$node" "$pid" "$comm" 2>/dev/null >> @RUN@/log/leftovers.log
done
exit 0
