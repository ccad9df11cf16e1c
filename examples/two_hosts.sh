#!/usr/bin/env bash
# Run this on every host, each time with the name of the first one and the same flags:
#
#     bash examples/two_hosts.sh FIRST_HOST [flags of train.py]
#
# Variables: NNODES (2), NPROC_PER_NODE (a rank per GPU, or per core without GPUs), PORT (29500).
set -euo pipefail
first_host=${1:?usage: two_hosts.sh FIRST_HOST [flags of train.py]}
shift

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun \
    --nnodes "${NNODES:-2}" \
    --nproc-per-node "${NPROC_PER_NODE:-auto}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first_host:${PORT:-29500}" \
    --rdzv-id pdt \
    "$(dirname "$0")/train.py" --strategy ddp "$@"
