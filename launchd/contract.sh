#!/bin/sh
# What the deployment believes of launchd, asked of launchd itself: run as root on a Mac (`make mac-contract`).
# The tests on other machines use a stand-in that was written from the same beliefs (tests/fleet/launchd.py); a line that
# says "not so" here means that the stand-in, and perhaps service.sh, must change.
# shellcheck disable=SC2317  # most functions are called by their names in a variable
set -u
label=mlxcel.contract
plist=/Library/LaunchDaemons/$label.plist
failed=0

claim() { # text, then what must be true
    text=$1
    shift
    if "$@"; then echo "so:     $text"; else echo "not so: $text"; failed=1; fi
}
answers() { # code, then a command
    wanted=$1
    shift
    "$@" >/dev/null 2>&1
    got=$?
    [ "$got" = "$wanted" ] || { echo "        ($* gave $got, not $wanted)"; return 1; }
}
within() { # seconds, then a command that must come true
    left=$(($1 * 5))
    shift
    until "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || return 1
        sleep 0.2
    done
}
is_loaded() { launchctl print "system/$label" >/dev/null 2>&1; }
is_gone() { ! is_loaded; }
has_pid() { [ -n "$(pid_of)" ]; }
pid_of() { launchctl print "system/$label" 2>/dev/null | sed -n 's/^[[:space:]]*pid = //p'; }
has_another_pid() { has_pid && [ "$(pid_of)" != "$1" ]; }
write() { # what the shell of the job does
    cat > "$plist" <<PLIST
<?xml version="1.0" encoding="UTF-8"?>
<plist version="1.0"><dict>
<key>Label</key><string>$label</string>
<key>ProgramArguments</key><array><string>/bin/sh</string><string>-c</string><string>$1</string></array>
<key>RunAtLoad</key><true/>
<key>KeepAlive</key><dict><key>SuccessfulExit</key><false/></dict>
<key>ThrottleInterval</key><integer>1</integer>
<key>ExitTimeOut</key><integer>4</integer>
<key>ProcessType</key><string>Interactive</string>
</dict></plist>
PLIST
    chown 0:0 "$plist"
    chmod 0644 "$plist"
}
clean() {
    launchctl bootout "system/$label" 2>/dev/null
    within 10 is_gone
    rm -f "$plist"
}
trap clean EXIT

clean
claim "print of an unknown label gives 113" answers 113 launchctl print "system/$label"
claim "bootout of an unknown label gives 3" answers 3 launchctl bootout "system/$label"
write 'trap "sleep 2; exit 0" TERM; while :; do sleep 0.1; done'
chmod 0666 "$plist"
claim "a job file that others may write is refused" answers 122 launchctl bootstrap system "$plist"
chmod 0644 "$plist"
claim "bootstrap starts it" answers 0 launchctl bootstrap system "$plist"
claim "print shows its pid" within 5 has_pid
claim "a second bootstrap gives 5" answers 5 launchctl bootstrap system "$plist"
first=$(pid_of)
kill -9 "$first"
claim "after SIGKILL it is started again" within 15 has_another_pid "$first"
launchctl bootout "system/$label" 2>/dev/null
claim "bootout returns before the process has ended" is_loaded
claim "and then it goes, within ExitTimeOut" within 6 is_gone
launchctl disable "system/$label"
claim "a disabled job gives 119" answers 119 launchctl bootstrap system "$plist"
launchctl enable "system/$label"
write 'trap "" TERM; while :; do sleep 0.1; done'
claim "an enabled one starts" answers 0 launchctl bootstrap system "$plist"
within 5 has_pid
launchctl bootout "system/$label" 2>/dev/null
claim "who ignores SIGTERM is killed after ExitTimeOut" within 8 is_gone
write 'exit 0'
launchctl bootstrap system "$plist"
sleep 3
claim "who ends with 0 is not started again" test -z "$(pid_of)"
exit $failed
