#!/bin/sh
# The server under launchd or systemd, by generation.
#   service.sh status                        what is current, previous and really running
#   service.sh switch GENERATION [PREVIOUS]  make it current, restart, wait until it is ready; PREVIOUS may be "none"
#   service.sh stop                          stop it and take it from the supervisor
set -eu
here=$(cd -P "$(dirname "$0")" && pwd)
home=${here%/generations/*}
# SUPERVISOR, LABEL, STOP_S, READY_S, WIRED_LIMIT_MB
# shellcheck source=/dev/null
. "$here/fleet.env"

say() { printf 'service: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

case $SUPERVISOR in
launchd)
    job=/Library/LaunchDaemons/$LABEL.plist
    is_loaded() { launchctl print "system/$LABEL" >/dev/null 2>&1; }
    pid_of() { launchctl print "system/$LABEL" 2>/dev/null | sed -n 's/^[[:space:]]*pid = //p'; }
    stop_job() { # bootout returns before the process is gone, and a bootstrap would fail until then
        is_loaded || return 0
        launchctl bootout "system/$LABEL" 2>/dev/null || ! is_loaded || say "bootout failed; waiting all the same"
        left=$((STOP_S * 5))
        while is_loaded; do
            left=$((left - 1))
            [ "$left" -gt 0 ] || die "$LABEL is still loaded after $STOP_S s"
            sleep 0.2
        done
    }
    start_job() {
        launchctl enable "system/$LABEL"
        for _ in 1 2 3 4 5; do
            if launchctl bootstrap system "$job"; then return 0; fi
            sleep 1
        done
        die "launchd does not take $job"
    }
    forget_job() { :; }
    # What the GPU may wire is forgotten at every boot, so a one-shot job sets it, beside doing it now.
    wired_job=/Library/LaunchDaemons/$LABEL.wired-limit.plist
    prepare() {
        if [ "$WIRED_LIMIT_MB" != 0 ]; then publish "$1/wired-limit" "$wired_job"; else rm -f "$wired_job"; fi
        [ "$(sysctl -n iogpu.wired_limit_mb)" = "$WIRED_LIMIT_MB" ] || sysctl "iogpu.wired_limit_mb=$WIRED_LIMIT_MB" >/dev/null
    }
    ;;
systemd)
    job=/etc/systemd/system/$LABEL.service
    pid_of() { systemctl show -p MainPID --value "$LABEL" | grep -v '^0$' || true; }
    stop_job() { [ ! -e "$job" ] || systemctl stop "$LABEL"; }
    start_job() {
        systemctl daemon-reload
        systemctl reset-failed "$LABEL" 2>/dev/null || true # it has not failed
        systemctl enable --quiet --now "$LABEL"
    }
    forget_job() { systemctl disable --quiet "$LABEL" 2>/dev/null || true; }
    wired_job=
    prepare() { :; }
    ;;
*) die "unknown supervisor $SUPERVISOR" ;;
esac

target_of() { basename "$(readlink "$home/$1" 2>/dev/null)"; }
point() { # a rename is atomic, and replaces a link rather than following it
    ln -s "generations/$2" "$home/.$1.$$"
    "$here/release/bin/python" -c 'import os, sys; os.replace(*sys.argv[1:])' "$home/.$1.$$" "$home/$1"
}

publish() { # file, target: world-readable and owned by root, as supervisors want their job files
    cp "$1" "$2.new"
    chmod 0644 "$2.new"
    mv -f "$2.new" "$2"
}

case ${1:-} in
status)
    pid=$(pid_of)
    echo "current=$(target_of current)"
    echo "previous=$(target_of previous)"
    echo "running=$([ -z "$pid" ] || cat "$home/run/generation" 2>/dev/null || true)"
    echo "pid=$pid"
    ;;
switch)
    wanted=$2
    [ -d "$home/generations/$wanted" ] || die "there is no generation $wanted"
    before=${3:-$(target_of current)}
    stop_job
    point current "$wanted"
    case $before in
    none) rm -f "$home/previous" ;;
    "" | "$wanted") ;;
    *) point previous "$before" ;;
    esac
    prepare "$home/generations/$wanted"
    publish "$home/generations/$wanted/job" "$job"
    start_job
    "$home/current/run" "$home/current/release/bin/python" "$here/probe.py" ready "$READY_S" || {
        tail -n 5 "$home"/log/*.log >&2
        exit 1
    }
    ;;
stop)
    stop_job
    forget_job
    rm -f "$job" "$wired_job"
    ;;
*) die "usage: service.sh status | switch GENERATION [PREVIOUS] | stop" ;;
esac
