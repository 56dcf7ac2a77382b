# Every verb sets up first when needed. `make demo` and `make test` are all a newcomer needs.
# The first Python from 3.11 on that is there; say PYTHON=... for another.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$name -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null \
	&& echo $$name && break; done)
VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
LISTED  := $(BIN)/python -c 'import sys, tomllib; \
	project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]; \
	print(*project["dependencies"], *(each for name in sys.argv[1:] for each in extras[name]), sep="\n")'
PYTHON3 := $(VENV)/.python
CORE    := $(VENV)/.core
NEEDED  := $(VENV)/.needed
WANTED  := $(VENV)/.wanted
READY   := $(VENV)/.ready
TOOLS   := $(VENV)/.tools
BESIDE  := @$(MAKE) --no-print-directory --jobs 2
CLIENTS := .venv-clients
# One worker more than processors: tests wait for processes, too.
WORKERS ?= 3
FAST    := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	--ignore tests/browser --ignore tests/gpu --ignore tests/clients \
	-m "not slow and not gpu and not browser and not chaos"

# Containers often ask Python to write no bytecode. Then every process that a test starts compiles the
# package anew, which was half of the processor time of the tests that start some.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup tools demo serve test suite test-slow stand-ins everything test-slower test-arm test-browser chaos chaos-nightly sanitize vocabularies reachability soak fuzz-loaders mutants check prove bench \
	bench-peers test-ray gpu-test gpu-bench docs wheel clean

# What running a model needs: the package, its compiled core, the default model.
setup: | $(PYTHON3)
	@test -e $(CORE) || echo "1 of 2: installing the package and compiling its core, about a minute"
	$(BESIDE) $(CORE) $(NEEDED)
	@$(MAKE) --no-print-directory $(READY)

# What testing needs on top: torch, the reference implementations, linters.
tools: | $(PYTHON3)
	$(BESIDE) $(CORE) $(WANTED)
	@$(MAKE) --no-print-directory setup
	@$(MAKE) --no-print-directory $(TOOLS)

$(PYTHON3):
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "Forerun needs Python 3.11 or newer, \
	and none is on the PATH. Install one, or say where it is: make setup PYTHON=/path/to/python3"; \
	exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# The package itself. The compiler makes way for pip, which has one process and as much to do.
$(CORE): pyproject.toml constraints.txt hatch_build.py $(wildcard csrc/*) | $(PYTHON3)
	nice $(PIP) --no-deps -e .
	@touch $@

# What the package needs, from pyproject.toml.
$(NEEDED): pyproject.toml constraints.txt | $(PYTHON3)
	$(LISTED) plots | $(PIP) -r /dev/stdin
	@touch $@

# What tests import of this is compiled when it is imported, which is a small part.
$(WANTED): $(NEEDED)
	(echo torch; $(LISTED) plots dev) | $(PIP) --no-compile -r /dev/stdin
	$(BIN)/python -c "import torch"
	@touch $@

# Without a compiler there is no compiled core, and torch has to do its work.
$(READY): $(CORE) $(NEEDED)
	@$(BIN)/forerun doctor --no-torch > /dev/null || $(PIP) torch
	@echo "2 of 2: fetching the default model, 98 MB"
	$(BIN)/forerun pull smollm2-135m
	@touch $@

$(TOOLS): $(READY) $(WANTED)
	@touch $@

demo: setup
	$(BIN)/forerun run "Write a Python function that counts the vowels in a string." --temperature 0 --max-tokens 256 --compare

serve: setup
	$(BIN)/forerun serve

# The linters and types, which keep one core busy for a minute, run beside the tests.
test: tools
	$(BESIDE) check suite

suite: tools
	$(FAST)

# What takes long: matrices pair by pair, training, kernels one instruction at a time. Suites that have a
# verb of their own are not run again.
SLOW    := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=30 --hypothesis-profile other \
	--ignore tests/constrain/test_reachability.py --ignore tests/constrain/test_vocabularies.py \
	--ignore tests/ray --ignore tests/clients --ignore tests/gpu --ignore tests/browser --ignore tests/chaos \
	--ignore tests/stand_ins

test-slow: tools
	$(SLOW) -m slow
	$(BIN)/python -m bench.compile_kernels --check
	$(BIN)/python -m bench.roofline --table bench/results/gpu-roofline.md --check

# Small models are trained with what drafts for them, half an hour of one core the first time, and kept
# in build/stand-ins: what is accepted at each depth (docs/results/speculation.md).
stand-ins: tools
	nice $(BIN)/python -m pytest -q -s tests/stand_ins

# Every suite that a CPU can run, one after the other, with a table of which ran when (hours).
SUITES ?=
everything: tools
	$(BIN)/python tests/everything.py $(SUITES)

# The same tests as `make test`, by clocks that run several times as fast: as on a slower machine.
test-slower: tools
	PYTHONPATH=$(CURDIR)/tests/chaos/slower $(FAST)

# What an adversary would try: faults, load, damaged files, statistics, whatever /openapi.json allows
# and forbids. 11 minutes on two quiet cores.
chaos: tools $(CLIENTS)/document/.ready
	$(BIN)/python -m pytest -q -m chaos tests/chaos
	FORERUN_PYTHON=$(BIN)/python $(CLIENTS)/document/bin/python -m pytest -q tests/clients/test_document.py

# The same, longer: more cases, kills and connections.
chaos-nightly: tools $(CLIENTS)/document/.ready
	CHAOS=nightly $(BIN)/python -m pytest -q -m chaos tests/chaos
	CHAOS=nightly FORERUN_PYTHON=$(BIN)/python $(CLIENTS)/document/bin/python -m pytest -q \
		tests/clients/test_document.py

# A server under mixed traffic; nothing may grow. Two hours, or MINUTES=10.
MINUTES ?= 120
soak: tools
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES)

# Every kind of grammar under every kind of vocabulary, large and published ones among them
# (Mistral's, of a package that nothing else here needs).
vocabularies: tools
	$(PIP) --no-deps --upgrade --target build/vocabularies mistral-common
	PYTHONPATH=build/vocabularies $(BIN)/python -m pytest -q tests/constrain/test_vocabularies.py

# A model that knows a valid text by heart writes it, under every keyword, escape and vocabulary.
reachability: tools
	$(BIN)/python -m pytest -q tests/constrain/test_reachability.py

# The compiled core under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: tools
	$(BIN)/python -m tests.chaos.sanitize

# The compiled core's tests as an ARM machine runs them (Debian: qemu-user, g++-aarch64-linux-gnu).
TESTS ?=
test-arm: tools
	$(BIN)/python -m tests.cpu.emulated_arm $(TESTS)

# Damaged model files, tables and grammars, guided by coverage (atheris); half an hour.
EACH ?= 3
fuzz-loaders: tools
	$(PIP) "forerun[fuzz]"
	$(BIN)/python -m tests.chaos.coverage_fuzz --minutes $(EACH)

# Changes the code of speculative/ and cache/ in one place at a time: do the tests notice? An hour.
mutants: tools
	nice -n 15 $(BIN)/python -m tests.chaos.mutants

# The web UI in headless Chromium (Debian: apt-get install chromium); skipped where there is none.
test-browser: tools
	$(BIN)/python -m pytest -q -m browser tests/browser

# Client libraries against the server (docs/use/clients.md). They want different versions of the same
# things, so each group lives in a virtual environment of its own.
test-clients: setup $(CLIENTS)/agents/.ready $(CLIENTS)/document/.ready $(CLIENTS)/evaluation/.ready \
	$(CLIENTS)/load/.ready
	FORERUN_PYTHON=$(BIN)/python $(CLIENTS)/agents/bin/python -m pytest -q tests/clients/test_agents.py
	FORERUN_PYTHON=$(BIN)/python $(CLIENTS)/document/bin/python -m pytest -q tests/clients/test_document.py
	FORERUN_PYTHON=$(BIN)/python $(CLIENTS)/evaluation/bin/python -m pytest -q tests/clients/test_evaluation.py
	FORERUN_PYTHON=$(BIN)/python $(CLIENTS)/load/bin/python -m pytest -q tests/clients/test_load.py

$(CLIENTS)/%/.ready: tests/clients/%.txt
	@test -x $(CLIENTS)/$*/bin/python || $(PYTHON) -m venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# Two real replicas by Ray Serve (docs/use/replicas.md).
test-ray: tools
	$(PIP) "forerun[ray]"
	$(BIN)/python -m pytest -q tests/ray

gpu-test: tools
	$(BIN)/python -m pytest -q -rpfEs tests/gpu

gpu-bench: tools
	$(BIN)/python bench/gpu.py rounds formats overlap served leak --out bench/results/gpu

check: tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

prove: setup
	$(BIN)/forerun prove

bench: setup
	$(BIN)/forerun bench --launch

bench-peers: setup
	$(BIN)/python bench/peers/over_http.py --out bench/out/peers-http.json
	$(BIN)/python bench/peers/over_http.py --model random-1b --streams 1 4 16 --requests 2 --least 4 \
		--servers "forerun plain" llama.cpp ik_llama.cpp "openvino genai" --out bench/out/peers-http-1b.json

# The site of docs/ in build/site; a link that leads nowhere is an error.
docs: setup
	$(PIP) "forerun[docs]"
	$(BIN)/python docs/site/migrating.py --check
	$(BIN)/python -m mkdocs build --strict

# dist/: a source archive, and a wheel whose tag says how old a Linux may be.
wheel: setup
	$(PIP) "forerun[wheel]"
	$(BIN)/python -m build --outdir build/dist .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/dist/forerun-*-linux_*.whl
	cp build/dist/forerun-*.tar.gz dist/

clean:
	rm -rf $(VENV) $(CLIENTS) build dist
