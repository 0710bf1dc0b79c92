#!/usr/bin/env bash
# Runs the scheduler out of its image as the calling user: no root, no daemon, no ids in /etc/subuid. It starts, is ready, and drains.
#   buildah --storage-driver vfs --root /tmp/quire-images/storage push localhost/quire-scheduler:test oci-archive:/tmp/scheduler.tar
#   tests/deploy/images/rootless.sh /tmp/scheduler.tar
set -euo pipefail

if [ -z "${_BUILDAH_STARTED_IN_USERNS:-}" ]; then  # buildah looks at this, too
    exec env _BUILDAH_STARTED_IN_USERNS=1 unshare --user --map-root-user --mount bash "$0" "$@"
fi

work=$(mktemp --directory)
export HOME=$work XDG_RUNTIME_DIR=$work/runtime
mkdir "$XDG_RUNTIME_DIR"
trap 'rm -rf "$work/storage" "$work/run" "$work"/*' EXIT
echo '{"default": [{"type": "insecureAcceptAnything"}]}' > "$work/policy.json"
store=(--storage-driver vfs --storage-opt vfs.ignore_chown_errors=true --root "$work/storage" --runroot "$work/run")
container=$(buildah "${store[@]}" from --quiet --signature-policy "$work/policy.json" "oci-archive:$1")
root=$(buildah "${store[@]}" mount "$container")

head --bytes 48 /dev/urandom | base64 > "$root/tmp/secret"
chmod 400 "$root/tmp/secret"
unshare --mount bash -c '
    mount --rbind /proc "$1/proc"
    mount --rbind /dev "$1/dev"
    exec env --ignore-environment PATH=/opt/quire/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 \
        chroot "$1" quire scheduler --host 127.0.0.1 --grpc-port 0 --metrics-port 0 --cluster-secret-file /tmp/secret
' - "$root" > "$work/out" &
service=$!
for _ in $(seq 600); do
    grep --quiet ready "$work/out" && break
    sleep 0.1
done
cat "$work/out"
kill -TERM "$service"
wait "$service"
