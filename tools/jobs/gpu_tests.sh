#!/usr/bin/env bash
# gpu_tests.sh SOURCE COMMIT: the tests that need a GPU, on one commit. Runs in an HF Job, without a token.
set -euo pipefail

git clone --quiet "$1" kernel
cd kernel
git checkout --quiet --detach "$2"
make test-gpu
