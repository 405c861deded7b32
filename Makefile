# Every target does its own set-up: Python 3.11+, pip and make are all that must be there.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check
STAMP  := $(VENV)/.ready
OFFICIAL := .venv-official
TINKERS := 0.26.0 0.13.1 0.4.1

.PHONY: help setup check test compat compat-env bench bench-engine proto clean
help:            ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv with the project, its extras and the dev tools
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q 'pip==25.3'
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(PIP) install -q -c constraints.txt -e '.[all]' --group dev
	touch $@

check: setup     ## ruff, pyright, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: setup      ## the whole test suite
	$(BIN)/python -m pytest -n 2 $(ARGS)

compat: setup compat-env  ## other people's clients, unmodified, against `tinkex serve`
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/compat $(ARGS)

compat-env: $(OFFICIAL)/.ready $(TINKERS:%=.venv-tinker-%/.ready) .venv-openai/.ready  ## the environments of those clients

.venv-tinker-%/.ready: tests/compat/constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check install -q -c $< tinker==$* torch==2.13.0
	touch $@

.venv-openai/.ready: tests/compat/constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check install -q -c $< openai
	touch $@

bench: setup $(OFFICIAL)/.ready  ## the official client and ours on one stub server, one table
	$(BIN)/python bench/client.py

bench-engine: setup  ## the engine and peft + transformers on the same weights and data, one table
	$(BIN)/python bench/engine.py $(ARGS)

$(OFFICIAL)/.ready: bench/official-constraints.txt
	test -x $(OFFICIAL)/bin/python || $(PYTHON) -m venv $(OFFICIAL)
	$(OFFICIAL)/bin/pip --disable-pip-version-check install -q -c $< tinker==0.36.0 torch==2.13.0
	touch $@

proto: .venv-proto/.ready  ## regenerate wire/tinkex_pb2.py from wire/tinkex.proto
	.venv-proto/bin/python -m grpc_tools.protoc -I src/tinkex/wire \
	    --python_out=src/tinkex/wire --pyi_out=src/tinkex/wire tinkex.proto

# Pinned: newer ones write code that only the newest protobuf reads.
.venv-proto/.ready:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip --disable-pip-version-check install -q grpcio-tools==1.73.1
	touch $@

clean:           ## remove environments and caches
	rm -rf $(VENV) .venv-* .pytest_cache .ruff_cache build dist
