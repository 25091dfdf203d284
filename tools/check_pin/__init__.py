"""Check a pinned revision of the kernel, in this repository's CI and in that of those who use it.

python -m tools.check_pin --help

__main__.py   the command line: which revision to check, and the order of the checks
pins.py       where a revision comes from: an argument, kernels.lock, the files of a checkout
hub.py        what the Hub says: repository, revision, branch, variants, trust
files.py      what was downloaded: against the Hub and against metadata.json
calls.py      the calls that a consumer makes, against the signatures in those files
smoke.py      runs the kernel, in a process of its own, against float64
report.py     results, messages, exit codes
"""
