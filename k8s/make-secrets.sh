#!/usr/bin/env bash
# k8s/make-secrets.sh [NAMESPACE]: the Secret `trust` that every service mounts: the cluster secret, and Redis's
# password. Created once: an existing one is not changed. Its contents never appear on a command line or on disk.
set -euo pipefail
namespace=${1:-quire}
if kubectl -n "$namespace" get secret trust >/dev/null 2>&1; then
  echo "secret/trust is there already" >&2
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
umask 077
openssl rand -hex 32 >"$folder/cluster-secret"
openssl rand -hex 32 >"$folder/redis-password"
echo "requirepass $(cat "$folder/redis-password")" >"$folder/redis.conf"
kubectl -n "$namespace" create secret generic trust --from-file="$folder"
