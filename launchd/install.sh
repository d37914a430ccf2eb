#!/bin/sh
# One Mac without a fleet: the same role, played on this machine itself.
#   launchd/install.sh install [ARCHIVE] [-e mlxcel_port=8000 ...]   build a release, or take one of `make wheelhouse`;
#                                                                    install it, start it, verify it
#   launchd/install.sh status                                        what is installed and what runs
#   launchd/install.sh uninstall                                     remove all of it
# Asks for the administrator's password where it is not run as root.
set -eu
cd "$(dirname "$0")/.."
command=${1:?usage: launchd/install.sh install|status|uninstall}
shift
home=/opt/mlxcel
python=.venv/bin/python

play() { # playbook, more options
    book=$1
    shift
    if [ "$(id -u)" = 0 ]; then set -- -e ansible_become=false "$@"; else set -- --ask-become-pass "$@"; fi
    # The Python that plays is also the one that acts: what else this machine has is not searched.
    printf '[mlxcel_servers]\nlocalhost ansible_connection=local ansible_python_interpreter={{ansible_playbook_python}}\n' > .venv/this-mac.ini
    ANSIBLE_CONFIG=ansible/ansible.cfg .venv/bin/ansible-playbook -i .venv/this-mac.ini "ansible/$book.yml" "$@"
}

case $command in
install)
    ops/setup.sh dev
    case ${1:-} in
    *.tar)
        release=$1
        shift
        ;;
    *)
        case $(uname -s)-$(uname -m) in
        Darwin-arm64) platform=macos-arm64 ;;
        Linux-*) platform=linux-$(uname -m) ;;
        *) echo "install: MLX needs a Mac with Apple silicon" >&2; exit 1 ;;
        esac
        release=$PWD/$("$python" -m ops.wheelhouse "$platform" | cut -d' ' -f1)
        ;;
    esac
    base=$("$python" -c 'import sys; print(sys._base_executable)')
    # One machine serves itself alone unless told otherwise.
    play upgrade -e "mlxcel_fleet_release=$release" -e "mlxcel_fleet_python=$base" -e mlxcel_host=127.0.0.1 "$@"
    ;;
status)
    if [ -x "$home/current/service.sh" ]; then "$home/current/service.sh" status; else echo "not installed (or not yours to see: try sudo)"; fi
    ;;
uninstall)
    ops/setup.sh dev
    play uninstall "$@"
    ;;
*)
    echo "usage: launchd/install.sh install|status|uninstall" >&2
    exit 1
    ;;
esac
