# Every target sets up what it needs: Python 3.11+, pip and make are the only requirements.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check
STAMP  := $(VENV)/.ready
OFFICIAL := .venv-official
CLIENT_PIP = $(@D)/bin/pip --disable-pip-version-check --retries 10
TINKERS := 0.28.1 0.26.0 0.24.1 0.22.7 0.18.2 0.16.1 0.13.1 0.4.1
PROGRAMS := agents inspect lm-eval trackers verifiers retrain art trinity
COOKBOOK := 0.5.8
# `make setup TORCH_INDEX=URL` takes torch from that package index, TORCH_INDEX=none from pip's own.
TORCH_OPTIONS = $$($(@D)/bin/python .ci/torch_index.py)
FAST := not slow and not gpu and not compat and not browser

.PHONY: help setup check test test-again test-browser test-fast demo compat compat-sdk compat-ci compat-env compat-cookbook cookbook-env deploy-check kills power-cuts bench bench-engine bench-server bench-line bench-cluster bench-trl bench-fairness proto clean
help:            ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv with the project, its extras and the dev tools
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	@echo "Setting up $(VENV) with packages from pip's index: minutes the first time, seconds afterwards."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q 'pip==25.3'
	$(PIP) install -q -c constraints.txt $(TORCH_OPTIONS) torch==2.13.0
	$(PIP) install -q -c constraints.txt -e '.[all]' --group dev
	touch $@

check: setup     ## ruff, pyright, import-linter, and gates of our own
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright -p pyright-engine.json
	$(BIN)/lint-imports
	$(BIN)/python -m tests.gates

# What pytest compiles is kept for the next run: compiling it is a tenth of the time.
test-fast: export PYTHONDONTWRITEBYTECODE =
test-fast: setup ## what to run before every commit: about a minute on two cores
	$(BIN)/python -m pytest -n 3 -m '$(FAST)' $(ARGS)

test: setup      ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not browser' $(ARGS)

test-browser: setup  ## the console in a real Chromium, one test at a time
	$(BIN)/python -m pytest -n 0 tests/server/test_*_browser.py $(ARGS)

test-again: setup  ## what failed in the last run, if it was at most three tests, one at a time
	$(BIN)/python -c 'import json; exit(len(json.load(open(".pytest_cache/v/cache/lastfailed"))) > 3)'
	$(BIN)/python -m pytest -n 0 -v --last-failed --last-failed-no-failures none $(ARGS)

demo: setup      ## watch a real model learn, on this machine's CPU
	$(BIN)/tinkex demo $(ARGS)

compat: compat-sdk compat-cookbook  ## all of other people's clients: 45 minutes

compat-sdk: setup compat-env cookbook-env  ## official SDKs, old and new, and OpenAI's, unmodified, on `tinkex serve`
	TINKEX_TEST_CLIENTS=all $(BIN)/python -m pytest -n 2 --dist loadfile tests/compat $(ARGS)

compat-ci: setup .venv-cookbook/.ready  ## what every change must pass: the newest SDK, some recipes
	TINKEX_TEST_CLIENTS=tinker-0.36.0 $(BIN)/python -m pytest -n 2 --dist loadfile tests/compat $(ARGS)
	TINKEX_TEST_CLIENTS=cookbook $(BIN)/python -m pytest tests/compat/cookbook -m ci $(ARGS)

compat-env: .venv-cookbook/.ready $(TINKERS:%=.venv-tinker-%/.ready) .venv-openai/.ready $(PROGRAMS:%=.venv-%/.ready)  ## the environments of those clients

compat-cookbook: setup cookbook-env  ## tinker-cookbook recipes and tutorials, unmodified, offline; ARGS='-m ci' for some
	TINKEX_TEST_CLIENTS=all $(BIN)/python -m pytest tests/compat/cookbook $(ARGS)

cookbook-env: .venv-cookbook/source/.ready .venv-cookbook-tinkex/.ready  ## the cookbook with the official SDK, and with ours

.venv-cookbook/.ready: tests/compat/cookbook/constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(CLIENT_PIP) install -q -c $< $(TORCH_OPTIONS) torch==2.13.0
	$(CLIENT_PIP) install -q -c $< tinker==0.36.0 'tinker-cookbook[tutorials]==$(COOKBOOK)' inspect-ai \
	    pytest-asyncio
	touch $@

# Only the source distribution has the tutorials and tests.
.venv-cookbook/source/.ready: .venv-cookbook/.ready
	.venv-cookbook/bin/pip --disable-pip-version-check --retries 10 download -q --no-deps \
	    --no-binary tinker-cookbook -d $(@D) tinker-cookbook==$(COOKBOOK)
	tar xzf $(@D)/tinker_cookbook-$(COOKBOOK).tar.gz -C $(@D) --strip-components=1
	touch $@

# The same packages without the official SDK: `tinker` is ours here.
.venv-cookbook-tinkex/.ready: tests/compat/cookbook/constraints.txt pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -v '^tinker==' $< > $(@D)/packages.txt
	$(CLIENT_PIP) install -q --no-deps $(TORCH_OPTIONS) -r $(@D)/packages.txt
	$(CLIENT_PIP) install -q -c $< -e '.[engine]'
	touch $@

.venv-tinker-%/.ready: tests/compat/constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(CLIENT_PIP) install -q -c $< $(TORCH_OPTIONS) tinker==$* torch==2.13.0
	touch $@

.venv-openai/.ready: tests/compat/constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(CLIENT_PIP) install -q -c $< openai
	touch $@

deploy-check: setup .venv-sky/.ready  ## SkyPilot's own parser on its task, and shellcheck
	$(BIN)/python -m pytest -n 0 tests/test_deploy.py $(ARGS)
	cd /tmp && $(CURDIR)/.venv-sky/bin/python -c 'import sys, sky; print(sky.Task.from_yaml(sys.argv[1]))' $(CURDIR)/deploy/skypilot.yaml

.venv-sky/.ready:
	$(PYTHON) -m venv $(@D)
	$(CLIENT_PIP) install -q skypilot==0.14.1
	touch $@

kills: setup  ## kill trainers, samplers, Ray nodes and the server 100 times: losses and weights stay the same
	$(BIN)/python -m tests.cluster.kills --kills 100 $(ARGS)
	$(BIN)/python -m tests.cluster.kills --kills 20 --shared $(ARGS)

# Programs for the APIs; every version is pinned, so pip need not look for versions that agree. The CPU build
# of torch 2.13.0 stands for newer and older ones: on PyPI those have gigabytes of CUDA libraries.
$(PROGRAMS:%=.venv-%/.ready): .venv-%/.ready: tests/compat/programs/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(CLIENT_PIP) install -q --no-deps $(TORCH_OPTIONS) -r $<
	touch $@

power-cuts: setup  ## drop unsynced writes at 1,000 random moments: nothing acknowledged may be lost
	$(BIN)/python -m tests.service.power_cut --cuts 1000 $(ARGS)

bench: setup $(OFFICIAL)/.ready  ## the official client and ours on one stub server, one table
	$(BIN)/python bench/client.py
	$(BIN)/python bench/cli.py

bench-engine: setup  ## the engine and peft + transformers on the same weights and data, one table
	$(BIN)/python bench/engine.py $(ARGS)

bench-server: setup  ## our server with the fake engine beside a bare echo, one table
	$(BIN)/python bench/server.py $(ARGS)

bench-line: setup $(OFFICIAL)/.ready  ## the official client on `tinkex serve` beside peft and generate, one table
	$(BIN)/python bench/line.py $(ARGS)

bench-trl: setup  ## our recipes and TRL's trainers on the same weights and data, one table
	$(BIN)/python bench/trainers.py $(ARGS)

bench-cluster: setup  ## what Ray costs and what more actors bring, with a fake device of fixed time, one table
	$(BIN)/python bench/cluster.py $(ARGS)

bench-fairness: setup  ## what one tenant notices while another floods the server, one table
	$(BIN)/python bench/fairness.py $(ARGS)

$(OFFICIAL)/.ready: bench/official-constraints.txt
	test -x $(OFFICIAL)/bin/python || $(PYTHON) -m venv $(OFFICIAL)
	$(CLIENT_PIP) install -q -c $< $(TORCH_OPTIONS) tinker==0.36.0 torch==2.13.0
	touch $@

proto: .venv-proto/.ready  ## regenerate wire/tinkex_pb2.py from wire/tinkex.proto
	.venv-proto/bin/python -m grpc_tools.protoc -I src/tinkex/wire \
	    --python_out=src/tinkex/wire tinkex.proto
	sed -i '/_serialized_\(start\|end\)=/d' src/tinkex/wire/tinkex_pb2.py  # offsets that nothing reads

# Pinned: newer versions generate code that only the newest protobuf reads.
.venv-proto/.ready:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip --disable-pip-version-check install -q grpcio-tools==1.73.1
	touch $@

clean:           ## remove environments and caches
	rm -rf $(VENV) .venv-* .pytest_cache .ruff_cache build dist
