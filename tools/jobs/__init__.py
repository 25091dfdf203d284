"""The two jobs that need machines of Hugging Face: the build with kernel-builder, and the tests on a GPU.

`python -m tools.jobs --help`. publish.sh and gpu_tests.sh are what the machines run.
"""
