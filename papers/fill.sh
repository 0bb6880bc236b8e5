#!/usr/bin/env bash
# Fills one GPU with experiments: several processes share it through MPS and take cases from the same queues.
#
#   papers/fill.sh SECONDS PROCESSES <<'PLAN'
#   papers.fedmap.real --data emnist47 office
#   papers.omniisr.table7
#   PLAN
#
# Every process goes through the lines of the plan; a case that one has taken no other takes, and cases that are in the log are not repeated.
# No run begins that would end after SECONDS as far as the process knows (from its own earlier runs and the log's last ones). Nothing is stopped on the way: under
# MPS a process that is killed at work takes the others with it. What each one says is in FILL_LOGS (by default a new folder).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=$1 processes=$2
mapfile -t plan
begun=$SECONDS
work=${FILL_LOGS:-$(mktemp -d)}
mkdir -p "$work/queues"
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
export CUDA_MPS_PIPE_DIRECTORY="$work/mps" CUDA_MPS_LOG_DIRECTORY="$work/mps"
if command -v nvidia-cuda-mps-control >/dev/null; then
  mkdir -p "$work/mps"
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi

worker() {
  local i left
  for i in "${!plan[@]}"; do
    left=$((seconds - (SECONDS - begun)))
    [ -n "${plan[$i]}" ] && [ "$left" -gt 0 ] || continue
    # The words of a line are split as a shell splits them: names of rows may hold blanks.
    eval "${PYTHON:-python} -m ${plan[$i]} --device ${FILL_DEVICE:-cuda} --queue '$work/queues/$i' --stop-after $left" >>"$work/$1.log" 2>&1 \
      || echo "process $1: ${plan[$i]} failed, see $work/$1.log" >&2
  done
}

for n in $(seq 1 "$processes"); do worker "$n" & done
wait
echo "made $(cat "$work"/*.log | grep -c '^{' || true) runs in $((SECONDS - begun)) s; logs in $work"
