"""What the maintainer runs: build, verify, check_layout. Standard library only, where nothing else is said."""
