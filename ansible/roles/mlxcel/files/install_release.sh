#!/bin/sh
# Unpack an archive of `make wheelhouse` into a virtual environment of its own: install_release.sh ARCHIVE FOLDER PYTHON
# Needs no network and removes the archive. FOLDER/complete is written last: a folder without it is begun again.
set -eu
archive=$1 folder=$2 python=$3
rm -rf "$folder"
mkdir -p "$folder/wheelhouse"
tar -xf "$archive" -C "$folder/wheelhouse"
"$python" -m venv --without-pip "$folder"
# pip is only needed here: it is run from the wheel that Python brings along.
pip_wheel=$("$python" -c '
import ensurepip, pathlib
folders = pathlib.Path(ensurepip.__file__).parent / "_bundled", pathlib.Path("/usr/share/python-wheels")
print(next(wheel for folder in folders for wheel in folder.glob("pip-*.whl")))')
pip() { "$folder/bin/python" "$pip_wheel/pip" install --quiet --disable-pip-version-check --no-input --no-cache-dir --no-index --no-deps "$@"; }
pip --find-links "$folder/wheelhouse/wheels" --require-hashes -r "$folder/wheelhouse/requirements.txt"
rm -rf "$folder/wheelhouse"
"$folder/bin/mlxcel" serve --check >/dev/null
date > "$folder/complete"
rm -f "$archive"
