# Everything here sets itself up: a virtual environment in .venv, filled once from requirements/dev.txt.

PYTHON ?= python3
WORKERS ?= 2

PY := .venv/bin/python
INSTALLED := .venv/.installed
# Workers share the cores; a thread pool in each of them would only get in the others' way.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow build verify api lint bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: build ## train a tiny language model with the kernel, on the CPU if there is nothing else
	LOCAL_KERNELS="trl-lib/fused-linear-ce=$(CURDIR)/build" $(PY) examples/train_tiny.py

test: lint verify ## lint, build, verify, and the tests that need neither a GPU nor much time
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(INSTALLED) ## the slow tests
	@$(PYTEST) -m slow; status=$$?; \
	if [ $$status -eq 5 ]; then echo "test-slow: no slow tests were collected"; exit 0; fi; exit $$status

build: $(INSTALLED) ## write build/, one directory per backend, as kernel-builder would
	$(PY) -m tools.build

verify: build ## check build/: metadata, digests, and that it agrees with build.toml
	$(PY) -m tools.verify

api: $(INSTALLED) ## write api/v<version>.json, the public API; refuses an incompatible change of a version
	$(PY) -m tools.api

lint: $(INSTALLED) ## ruff, and the rules that a kernel's source has to keep
	$(PY) -m ruff check
	$(PY) -m tools.check_layout

bench: build ## time the loss against its alternatives
	LOCAL_KERNELS="trl-lib/fused-linear-ce=$(CURDIR)/build" $(PY) benchmarks/loss.py

clean: ## remove what the other targets write, but keep .venv
	rm -rf build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(INSTALLED): requirements/dev.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --requirement requirements/dev.txt
	touch $@
