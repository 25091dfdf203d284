"""What the maintainer runs: build, verify, check_layout, release. Standard library only, if nothing else is said."""
