#!/usr/bin/env bash
# A training on several machines of a Slurm cluster; from the root of a checkout that all of them see:
#     sbatch deploy/slurm.sh --dataset ml-1m
#     sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh --dataset ml-32m --num_workers 4
# Two minutes before its time is over, or when the job must make room for another, all ranks get a SIGTERM and
# write a checkpoint into SAVE_DIR; the job is queued again and continues from there.
#SBATCH --job-name=recommender
#SBATCH --nodes=2
# One launcher a machine; it starts a process for each GPU, or NPROC.
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs a copy of this file that lies elsewhere.
cd -- "$SLURM_SUBMIT_DIR"
save_dir="${SAVE_DIR:-$SLURM_SUBMIT_DIR/dumps}"

first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export NNODES="$SLURM_JOB_NUM_NODES"
# A port of its own for each job, as two may share a machine.
export RDZV_ENDPOINT="$first:$((20000 + SLURM_JOB_ID % 10000))"

# Once, before all machines would do it at the same time.
./run.sh setup

status=0
srun ./run.sh dump --resume --dump_every 100 --save_dir "$save_dir" "$@" || status=$?
# All ranks ended by the SIGTERM, after a checkpoint. "scancel" ends this script too, and nothing is queued.
if ((status == 143)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
