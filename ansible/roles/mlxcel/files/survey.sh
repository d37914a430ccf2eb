#!/bin/sh
# One look at a host that changes nothing: what it lacks, a line each, then what it has and what runs on it, as name=value.
# Exit code 1 if a lack is not accepted. Reads PLATFORM (empty: as the host says), HOME_DIR, ACCOUNT, PYTHON, MIN_MACOS, MIN_DISK_GB, MIN_MEMORY_GB, WIRED_LIMIT_MB and ACCEPT (words, see `lack`).
set -eu
failed=0
PLATFORM=${PLATFORM:-$(uname -s)}

lack() { # word, text
    case " ${ACCEPT:-} " in
    *" $1 "*) echo "accepted ($1): $2" ;;
    *) echo "lacks ($1): $2"; failed=1 ;;
    esac
}
at_least() { # have, wanted: dotted numbers
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -t. -k1,1n -k2,2n | head -n 1)" = "$2" ]
}
find_python() {
    for candidate in ${PYTHON:-} /opt/homebrew/bin/python3 /opt/homebrew/bin/python3.14 /opt/homebrew/bin/python3.13 \
        /opt/homebrew/bin/python3.12 /opt/homebrew/bin/python3.11 /usr/local/bin/python3 /usr/bin/python3; do
        if "$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        # A path that was asked for is not replaced by another one.
        [ -z "${PYTHON:-}" ] || return 0
    done
}

if [ "$PLATFORM" = Darwin ]; then
    macos=$(sw_vers -productVersion)
    at_least "$macos" "$MIN_MACOS" || lack macos "macOS $macos, and $MIN_MACOS is needed"
    chip=$(sysctl -n machdep.cpu.brand_string)
    case $chip in Apple*) ;; *) lack chip "the chip is $chip, not one of Apple's" ;; esac
    memory_bytes=$(sysctl -n hw.memsize)
    [ "$WIRED_LIMIT_MB" -le $((memory_bytes * 9 / 10 / 1048576)) ] ||
        lack wired "a wired limit of $WIRED_LIMIT_MB MB leaves too little of $((memory_bytes / 1048576)) MB to the system"
    for setting in 'sleep 0' 'autorestart 1'; do
        found=$(pmset -g custom | sed -n "s/^ *${setting% *} *\([0-9]*\).*/\1/p" | sort -u | tr '\n' ' ')
        [ "${found% }" = "${setting#* }" ] ||
            lack power "pmset ${setting% *} is '${found% }': run  pmset -a $setting  (a server must not sleep, and must come back)"
    done
    fdesetup status | grep -q 'is Off' ||
        lack filevault "FileVault waits for a password at a cold boot; plan reboots with  fdesetup authrestart"
    echo "has: macOS $macos, $chip, iogpu.wired_limit_mb $(sysctl -n iogpu.wired_limit_mb)"
else
    memory_bytes=$(($(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo) * 1024))
    case $(uname -m) in x86_64 | aarch64) ;; *) lack chip "the machine is $(uname -m): MLX has wheels for x86_64 and aarch64" ;; esac
fi
memory_gb=$(((memory_bytes + 536870912) / 1073741824))
[ "$memory_gb" -ge "$MIN_MEMORY_GB" ] || lack memory "$memory_gb GB of memory, and $MIN_MEMORY_GB are needed"

folder=$HOME_DIR
while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
disk_gb=$(($(df -Pk "$folder" | awk 'NR == 2 { print $4 }') / 1048576))
[ "$disk_gb" -ge "$MIN_DISK_GB" ] || lack disk "$disk_gb GB free at $folder, and $MIN_DISK_GB are needed"

python=$(find_python)
[ -n "$python" ] || lack python "no Python 3.11 or newer with ensurepip; name one, or carry one along"
echo "has: $memory_gb GB of memory, $disk_gb GB free"
echo "platform=$PLATFORM"
echo "python=$python"
if id -u "$ACCOUNT" >/dev/null 2>&1; then echo "account=$ACCOUNT"; fi
if cd "$HOME_DIR" 2>/dev/null; then
    for release in releases/*/complete; do [ ! -e "$release" ] || echo "$(dirname "$release")=there"; done
    for sums in models/*/SHA256SUMS; do
        [ ! -e "$sums" ] || echo "$(dirname "$sums")=$({ shasum -a 256 "$sums" 2>/dev/null || sha256sum "$sums"; } | cut -d' ' -f1)"
    done
    [ ! -x current/service.sh ] || current/service.sh status
fi
exit $failed
