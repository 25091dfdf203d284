"""Benchmarks of the kernel against its peers. `python -m benchmarks.loss --help` is the entry point; see NOTES.md."""
