#!/bin/sh
# Runs on a host with a GPU, in the directory that `cargo xtask device pack` has made: facts, tests, figures.
# Writes gpu.json and one log per step to the directory that the first argument names (default: results here).
# Every step has its own time limit; all together take at most ten minutes.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/results}
mkdir -p "$out" || exit 2
export SNOWSKIN_LOG=${SNOWSKIN_LOG:-warn}
steps=""
failed=0

# step NAME LIMIT_S COMMAND…: stdout to NAME.out, stderr to NAME.log.
step() {
  name=$1 limit=$2
  shift 2
  begun=$(date +%s)
  timeout -k 5 "$limit" "$@" >"$out/$name.out" 2>"$out/$name.log"
  code=$?
  took=$(($(date +%s) - begun))
  printf '%-24s exit %-3s %4s s\n' "$name" "$code" "$took"
  steps="$steps${steps:+,}{\"step\":\"$name\",\"exit\":$code,\"seconds\":$took}"
  [ "$code" -eq 0 ] || failed=1
}

# The JSON that a step has printed, or null.
json_of() {
  if [ -s "$out/$1.out" ] && head -c 1 "$out/$1.out" | grep -q '[[{]'; then cat "$out/$1.out"; else echo null; fi
}

text() { printf '%s' "$1" | tr -d '"\\\n\t'; }

step facts 20 sh -c 'uname -srm; nproc; nvidia-smi -L 2>/dev/null || cat /proc/driver/nvidia/version'
step doctor 60 "$here/snowskin" doctor --json
step topology 60 "$here/snowskin" topology --gpu --json
for test in "$here"/test-*; do
  [ -x "$test" ] && step "$(basename "$test")" 150 "$test" --test-threads 1
done
# Between two processes, one after the other in one run, three rounds: host to host, and each mix with the GPU.
rows=""
for round in 1 2 3; do
  for pair in host,host cuda:0,host host,cuda:0 cuda:0,cuda:0; do
    ours=${pair%,*} theirs=${pair#*,}
    name=bench-$round-$(echo "$pair" | tr ',:' '--')
    step "$name" 40 "$here/snowskin" bench transfer --fabric tcp --memory "$ours" --target-memory "$theirs" \
      --block 4KiB,64KiB,1MiB --batch 16 --duration 0.5 --json
    rows="$rows${rows:+,}{\"round\":$round,\"memory\":\"$ours\",\"target_memory\":\"$theirs\",\"rows\":$(json_of "$name")}"
  done
done
{
  printf '{"date":"%s","facts":"%s",' "$(date -u +%Y-%m-%d)" "$(text "$(tr '\n' ';' <"$out/facts.out")")"
  printf '"steps":[%s],"doctor":%s,"topology":%s,' "$steps" "$(json_of doctor)" "$(json_of topology)"
  printf '"transfers":[%s]}\n' "$rows"
} >"$out/gpu.json"
echo "written: $out/gpu.json and a log per step"
exit $failed
