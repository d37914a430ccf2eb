#!/bin/sh
# A gateway that sends equal prefixes to one server, in HAProxy's place: router.sh sglang|vllm PORT SERVER_URL...
# `make routers` installs both; what was seen of them is in docs/deploy.md. Metrics are on PORT + 1.
set -eu
kind=${1:?usage: router.sh sglang|vllm PORT SERVER_URL...} port=$2
shift 2
case $kind in
sglang) set -- launch --worker-urls "$@" ;;
vllm) set -- --worker-urls "$@" ;;
*) echo "router.sh: $kind is neither sglang nor vllm" >&2; exit 1 ;;
esac
PATH="$(dirname "$0")/../../.routers/bin:$PATH"

# Affinity: the server with the longest known beginning of this prompt, unless it has more than one request over the least
# loaded. By default that is 64 requests, more than our servers hold.
set -- "$@" --policy cache_aware --cache-threshold 0.3 --balance-abs-threshold 1 --balance-rel-threshold 1.1

# A 503 is tried again elsewhere only if the server is left out meanwhile: affinity would choose it again (vllm-router), and with
# the defaults ten refusals shut a server out for a minute, and in the end all of them. One refusal, one second.
set -- "$@" --cb-failure-threshold 1 --cb-success-threshold 1 --cb-timeout-duration-secs 1
set -- "$@" --retry-max-retries 5 --retry-initial-backoff-ms 50 --retry-max-backoff-ms 500

# /health/ready is 503 while a server loads or drains.
set -- "$@" --health-check-endpoint /health/ready --health-check-interval-secs 1 --health-check-timeout-secs 2
set -- "$@" --health-failure-threshold 2 --health-success-threshold 1 --worker-startup-check-interval 1

# As HAProxy has them: a body of 16 MiB, half an hour for an answer.
set -- "$@" --max-payload-size 16777216 --request-timeout-secs 1800
exec "$kind-router" "$@" --host "${ROUTER_HOST:-127.0.0.1}" --port "$port" --prometheus-port $((port + 1))
