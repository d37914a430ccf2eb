#!/bin/sh
# Keep the newest KEPT generations, the current and the previous one, and the releases that those name: prune.sh HOME KEPT
set -eu
cd "$1"
current=$(basename "$(readlink current)")
previous=$(basename "$(readlink previous 2>/dev/null || true)")
number=0
# Their names are hex digits, so a list by age can be read word by word.
# shellcheck disable=SC2012,SC2045
for generation in $(ls -1t generations); do
    number=$((number + 1))
    case $generation in "$current" | "$previous") continue ;; esac
    [ "$number" -gt "$2" ] || continue
    rm -rf "generations/$generation"
    echo "generation $generation"
done
rm -rf generations/.draft-*
for release in releases/*/; do
    name=$(basename "$release")
    [ -d "$release" ] || continue
    for link in generations/*/release; do
        [ "$(basename "$(readlink "$link")")" != "$name" ] || continue 2
    done
    rm -rf "$release"
    echo "release $name"
done
