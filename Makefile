# Everything here sets itself up: a virtual environment in .venv, filled once from requirements/dev.txt.

PYTHON ?= python3
WORKERS ?= 2

PY := .venv/bin/python
INSTALLED := .venv/.installed
INSTALLED_TRL := .venv/.installed-trl
TRL_VERSIONS ?= $(shell sed -n 's/^trl==//p' requirements/trl-versions.txt)
NEWEST_TRL := .venv/trl/$(lastword $(TRL_VERSIONS))
# Workers share the cores; a thread pool in each of them would only get in the others' way.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-trl test-gpu build verify api api-check release publish-and-train publish-job
.PHONY: gpu-job check-head check-pin lint bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) $(NEWEST_TRL) ## publish to a local Hub, load the kernel from there by commit, train tiny models with it
	$(PY) -m tools.local_hub -- $(MAKE) --no-print-directory publish-and-train

# On the Hub that HF_ENDPOINT names. Only a local one takes a checkout with uncommitted changes.
publish-and-train: $(INSTALLED) $(NEWEST_TRL)
	revision=$$($(PY) -m tools.release --quiet --allow-dirty) && \
	$(PY) examples/train_tiny.py --revision $$revision --trust-remote-code && \
	FUSED_LINEAR_CE_REVISION=$$revision PYTHONPATH=integrations/trl:$(NEWEST_TRL) \
	$(PY) examples/train_trl.py --trust-remote-code

test: lint verify ## lint, build, verify, and the tests that need neither a GPU nor much time
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(INSTALLED) ## the slow tests, and those of the TRL adapter on the newest TRL
	@$(PYTEST) -m slow; status=$$?; \
	if [ $$status -eq 5 ]; then echo "test-slow: no slow tests were collected"; exit 0; fi; exit $$status
	$(MAKE) test-trl TRL_VERSIONS="$(lastword $(TRL_VERSIONS))"

test-trl: build $(TRL_VERSIONS:%=.venv/trl/%) ## all tests of the TRL adapter, on every TRL version that it is tested with
	@for version in $(TRL_VERSIONS); do \
	  echo "TRL $$version"; \
	  PYTHONPATH=integrations/trl:.venv/trl/$$version $(PYTEST) -m "not gpu" integrations/trl/tests || exit 1; \
	done

test-gpu: $(INSTALLED) ## the tests that need a GPU; without one they are skipped
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 0 -m gpu

build: $(INSTALLED) ## write build/, one directory per backend, as kernel-builder would
	$(PY) -m tools.build

verify: build ## check build/: metadata, digests, and that it agrees with build.toml
	$(PY) -m tools.verify

api: $(INSTALLED) ## write api/v<version>.json, the public API; refuses an incompatible change of a version
	$(PY) -m tools.api

# BASE is a git revision, such as the branch that a pull request goes to.
api-check: $(INSTALLED) ## check api/v<version>.json, and that its change since BASE is one that keeps the version
	$(PY) -m tools.api --check $(if $(BASE),--base $(BASE))

release: $(INSTALLED) ## publish on the Hub and print the commit to pin; ARGS=--dry-run shows what would change
	$(PY) -m tools.release $(ARGS)

# On HF Jobs, for COMMIT; ARGS=--dry-run prints the job.
publish-job: $(INSTALLED) ## build COMMIT with kernel-builder on a machine of Hugging Face, and upload it
	$(PY) -m tools.jobs publish --commit "$(COMMIT)" $(ARGS)

gpu-job: $(INSTALLED) ## run the GPU tests of COMMIT on a machine of Hugging Face
	$(PY) -m tools.jobs gpu-tests --commit "$(COMMIT)" $(ARGS)

# Both download a published kernel and run its code here; ARGS=--no-run leaves that out.
check-head: $(INSTALLED) ## check the published kernel that version=1 loads now
	$(PY) -m tools.check_pin --head --manifest examples/consumer/calls.json $(ARGS)

check-pin: $(INSTALLED) ## check the published kernel that the files of this checkout pin
	$(PY) -m tools.check_pin --checkout . --manifest examples/consumer/calls.json $(ARGS)

lint: $(INSTALLED) ## ruff, the rules that a kernel's source has to keep, and the workflows
	$(PY) -m ruff check
	$(PY) -m tools.check_layout
	.venv/bin/zizmor --offline --no-progress --quiet --persona auditor .github
	.venv/bin/actionlint .github/workflows/*.yaml

bench: build ## time the loss against its alternatives
	LOCAL_KERNELS="trl-lib/fused-linear-ce=$(CURDIR)/build" $(PY) benchmarks/loss.py

clean: ## remove what the other targets write, but keep .venv
	rm -rf build examples/out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Each TRL in a folder of its own, so that one environment serves all versions.
.venv/trl/%: $(INSTALLED_TRL)
	$(PY) -m pip install --quiet --no-deps --target $@ trl==$*

$(INSTALLED_TRL): $(INSTALLED) requirements/trl.txt
	$(PY) -m pip install --quiet --no-build-isolation --requirement requirements/trl.txt
	touch $@

$(INSTALLED): requirements/dev.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --requirement requirements/dev.txt
	touch $@
