#!/usr/bin/env bash
# publish.sh SOURCE COMMIT: build one commit with kernel-builder and upload it to the repository that build.toml names.
# Runs in an HF Job. HF_TOKEN is in its environment, so tracing, which would print it, goes off first.
set +x
set -euo pipefail

git clone --quiet "$1" kernel
cd kernel
git checkout --quiet --detach "$2"

if [ -n "$(git ls-files -- build)" ]; then
  echo "publish: the commit holds build/: what is published is built from the source, here" >&2
  exit 1
fi
if [ -z "$(git ls-files -- flake.lock)" ]; then
  echo "publish: the commit has no flake.lock, which pins kernel-builder: run 'nix flake lock' and commit it" >&2
  exit 1
fi

kernel-builder check-config
kernel-builder build-and-upload
