# `make demo` and `make test` need python3, make and a C++ compiler, and set up all the rest in .venv.
# With PY=<interpreter> nothing is set up and that interpreter is used as it is (on a machine without a network, say).
PYTHON ?= python3
FLOOR_PYTHON ?= python3.10

ifdef PY
RUN    := PYTHONPATH=$(CURDIR) $(PY)
CHECK  := $(PY) tools/check.py --python $(PY)
else
RUN    := .venv/bin/python
CHECK  := $(PYTHON) tools/check.py
ENV    := .venv/stamp
endif

# What the environments are made from: the native launcher is compiled when the package is installed.
MADE_FROM := pyproject.toml setup.py constraints.txt tools/environment.py $(wildcard csrc_cuda/host/*)

.DEFAULT_GOAL := help
.PHONY: help demo test lint types rooms hip packaging tests test-gpu test-floor bench docs wheel clean

help:       ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: $(ENV)  ## what is installed, a tour of the operations, and a real model in FP8
	@$(RUN) -m dg_core demo

test:       ## lint, types, rooms, hip, packaging and tests, and the minutes that each part took
	@$(CHECK)

lint:       ## ruff, clang-format, the links of the checkout
	@$(CHECK) $@

types:      ## mypy --strict
	@$(CHECK) $@

rooms:      ## import-linter: which module may import which
	@$(CHECK) $@

hip:        ## build_dcu.sh: the HIP kernels for the processor, and for gfx950 where clang-22 is
	@$(CHECK) $@

packaging:  ## pytest: an editable install, a wheel, a wheel from an sdist and PYTHONPATH give the same package
	@$(CHECK) $@

tests:      ## pytest: all the other tests
	@$(CHECK) $@

test-gpu:   ## pytest: the tests that need a card
	@$(CHECK) $@

test-floor: .venv-floor/stamp  ## the tests on Python 3.10 and torch 2.9 (downloads several gigabytes the first time)
	@$(PYTHON) tools/check.py --python .venv-floor/bin/python packaging tests

bench: $(ENV)  ## table of the operations on the best backend here; benchmarks/dense.py has more, on a card
	@$(RUN) -m dg_core bench

docs: $(ENV)  ## the pages made from the tables, and the HTML pages of the API in build/docs
	@$(RUN) tools/docs.py

wheel: $(ENV)  ## an sdist, and a wheel from it, in dist/
	@$(RUN) -m build --no-isolation --outdir dist .

clean:      ## remove what the other targets wrote, the environments included
	rm -rf .venv .venv-floor build dist backends/cuda/_C*.so backends/hip/lib *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/stamp: $(MADE_FROM)
	@$(PYTHON) tools/environment.py

.venv-floor/stamp: $(MADE_FROM)
	@$(FLOOR_PYTHON) tools/environment.py --floor
