#!/usr/bin/env bash
# Tinkex on SLURM: a Ray cluster over the job's nodes, and `tinkex serve` on the first of them.
#
#   MODEL='Qwen/Qwen3-8B,trainers=5,samplers=3-11' sbatch --nodes=2 --gpus-per-node=8 deploy/slurm.sh
#
# TINKEX_HOME and the models (HF_HOME) are on a file system that all nodes share: every node reads Ray's token
# and the models, and the next job's server, which goes on where this one ended, may be on another node.
# `tinkex plan` says how to split the GPUs. Make a key first: `tinkex server keys add NAME`.
#SBATCH --job-name=tinkex
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@60
set -euo pipefail

: "${MODEL:?give MODEL, as NAME=PLACE,trainers=M,samplers=N}"
export TINKEX_HOME=${TINKEX_HOME:-$HOME/.tinkex}
PORT=${PORT:-8000}
RAY_PORT=${RAY_PORT:-6379}

# Whoever reaches Ray's ports can run code: every process of the cluster needs this token.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH=$TINKEX_HOME/ray-token
export RAY_USAGE_STATS_ENABLED=0
mkdir -p "$TINKEX_HOME"
if [[ ! -s $RAY_AUTH_TOKEN_PATH ]]; then
  (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")
fi

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}
HEAD_IP=$(srun --nodes=1 --ntasks=1 --nodelist="$HEAD" hostname --ip-address | awk '{print $1}')
ADDRESS=$HEAD_IP:$RAY_PORT

srun --nodes=1 --ntasks=1 --nodelist="$HEAD" --overlap \
  ray start --head --node-ip-address="$HEAD_IP" --port="$RAY_PORT" --include-dashboard=false --block &
for _ in $(seq 60); do
  if ray status --address="$ADDRESS" > /dev/null 2>&1; then break; fi
  sleep 2
done
for NODE in "${NODES[@]:1}"; do  # once the head is there: they wait for it for less than a minute
  srun --nodes=1 --ntasks=1 --nodelist="$NODE" --overlap ray start --address="$ADDRESS" --block &
done

srun --nodes=1 --ntasks=1 --nodelist="$HEAD" --overlap \
  tinkex serve --cluster "$ADDRESS" --model "$MODEL" --host 0.0.0.0 --port "$PORT" &
SERVER=$!
trap 'kill -TERM "$SERVER"; wait "$SERVER"' TERM
echo "Clients: export TINKER_BASE_URL=http://$HEAD:$PORT"
wait "$SERVER"
