#!/bin/sh
# Load this generation's settings, then become the server, or the command that is given.
set -eu
here=$(cd -P "$(dirname "$0")" && pwd)
set -a
# shellcheck source=/dev/null
. "$here/settings.env"
# shellcheck source=/dev/null
. "$here/secrets.env"
set +a
if [ $# = 0 ]; then
    # Who deploys compares this with what is wanted, so that no restart can be forgotten.
    basename "$here" > "$here/../../run/generation"
    set -- "$here/release/bin/mlxcel" serve
fi
exec "$@"
