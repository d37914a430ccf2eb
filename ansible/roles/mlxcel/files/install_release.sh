#!/bin/sh
# Unpack an archive of `make wheelhouse` into a virtual environment of its own: install_release.sh ARCHIVE FOLDER PYTHON
# Needs no network and removes the archive. FOLDER/complete is written last: a folder without it is begun again.
set -eu
archive=$1 folder=$2 python=$3
rm -rf "$folder"
mkdir -p "$folder/wheelhouse"
tar -xf "$archive" -C "$folder/wheelhouse"
"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-cache-dir --no-index --no-deps "$@"; }
pip --find-links "$folder/wheelhouse/wheels" --require-hashes -r "$folder/wheelhouse/requirements.txt"
rm -rf "$folder/wheelhouse"
"$folder/bin/mlxcel" serve --check >/dev/null
date > "$folder/complete"
rm -f "$archive"
