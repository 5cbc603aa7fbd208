# Everything a developer runs. Needs make and a Python of 3.11 or later; the rest goes into .venv.

PYTHON ?= python3
VENV ?= .venv
EMULATOR := .venv-emulator
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo
# Python compiles what is imported, when it is: pip would compile all, of which most never is.
PIP_LOCKED := python -m pip install --no-deps --no-compile --require-hashes --only-binary :all:

# Tests start hundreds of processes, each of which would compile the package for itself.
unexport PYTHONDONTWRITEBYTECODE

# fastrack's native extension in this checkout, which everything that runs fastrack needs. The file is older than one of its
# sources, or than one that could be: then it is looked at, and made again if a source differs. On other machines there is none.
PLATFORM := $(shell uname -sm)
NATIVE := $(if $(filter Linux-x86_64 Linux-aarch64,$(subst $() $(),-,$(PLATFORM))),fastrack/_crypto/_native.abi3.so)
# It is linked by the C compiler of this machine if there is one, else by ziglang, as wheels are.
ZIGLANG := .ziglang
LINKER := $(if $(shell command -v $${CC:-cc}),,$(ZIGLANG)/.installed)
WITH_ZIGLANG := PYTHONPATH=$(CURDIR)/$(ZIGLANG)
# LMCache's storage, for the tests of sealed KV blocks: apart, as it shares no versions with .venv.
LMCACHE := .lmcache
# What test suites of others run with.
PEERS_TESTS := .venv-peers-tests
NODE_STAMP := tests/javascript/node_modules/.installed
# Other environments than .venv link to this checkout and its native extension, and get nothing to make that.
BACKEND = $$(grep -oE '^(hatchling|editables)==[0-9.]*' requirements.txt)

.PHONY: help help-all demo install native test test-all repository test-nightly test-lowest test-openssl test-pythons matrix fresh coverage check lint workflows bench bench-compare peers gpu \
	gpu-kit emulator aarch64 aarch64-wheel peers-tests integrations javascript swift nvrtc ptx mutants fuzz soak docs site site-check writers lock dist wheels release-files release-check testkit-dist environments clean

# What a newcomer needs. Lines are broken between words, as a terminal of 80 columns shows them.
FIRST := demo install test check docs bench gpu clean
listed = @awk -F ':.*\#\# ' -v first=" $(FIRST) " '/^[a-z0-9-]+:.*\#\# / && (index(first, " " $$1 " ") > 0) == $(1) { \
	line = sprintf("make %-14s", $$1); count = split($$2, words, " "); \
	for (i = 1; i <= count; i++) { if (length(line " " words[i]) > 80) { print line; line = sprintf("%19s", "") } line = line " " words[i] } \
	print line }' Makefile

help:  ## list the targets that are used most
	$(call listed,1)
	@echo "make help-all       list the others"

help-all:  ## list the other targets
	$(call listed,0)

demo: $(DEMO_STAMP) $(NATIVE)  ## seal a text, train on it, refuse a forgery, compare speeds
	$(BIN)/fastrack demo

install: $(STAMP) $(NATIVE) $(LMCACHE)/.installed .venv-workflows/.installed $(EMULATOR)/.installed $(NODE_STAMP) $(ZIGLANG)/.installed  ## install all that the tests of a change need

native: $(STAMP) $(NATIVE)  ## make fastrack's native extension in this checkout, if its sources have changed; half a minute

$(NATIVE): $(shell find fastrack/_crypto fastrack/_devices/cuda kernels -name '*.py') $(wildcard kernels/*.cu*) | $(DEMO_STAMP) $(LINKER)
	@test -e $@ || echo "fastrack's native extension is made once, in some fifteen seconds:"
	@PYTHONPATH=kernels$(if $(LINKER),:$(CURDIR)/$(ZIGLANG)) $(BIN)/python -m fastrack_native
	@$(BIN)/python -m fastrack._devices.cuda.cubins  # where there is NVRTC; else CuPy compiles them when a GPU is opened

# Three processes for two cores, as many tests wait for processes of their own. The tests of a file stay together and share
# what it compiles; the order is that of tests/conftest.py.
PARALLEL := --numprocesses 3 --dist loadscope --no-loadscope-reorder
QUICK := -m "not slow and not nightly and not repository"

test: $(STAMP) $(NATIVE)  ## run the quick tests; three minutes on two cores
	$(BIN)/python -m pytest $(PARALLEL) $(QUICK)

# Other versions of NVRTC than that of .venv, for the tests that read what it makes of the kernels.
NVRTCS := 13.0.88 12.9.86
nvrtcs = FASTRACK_NVRTC=$(subst $() $(),:,$(addprefix .nvrtc/,$(1)))

test-all: $(STAMP) $(NATIVE) $(LMCACHE)/.installed  ## run all tests but those of check and of the emulator, and those for the night
	$(BIN)/python -m pytest $(PARALLEL) -m "not nightly and not repository"

$(LMCACHE)/.installed: tests/serving/lmcache.txt | $(STAMP)
	rm -rf $(LMCACHE)
	$(BIN)/$(PIP_LOCKED) --quiet --target $(LMCACHE) --requirement $<
	touch $@

test-nightly: $(STAMP) $(EMULATOR)/.installed $(NATIVE) $(NVRTCS:%=.nvrtc/%/.installed)  ## run the tests that take long, those of the emulator too
	$(call nvrtcs,$(NVRTCS)) $(BIN)/python -m pytest $(PARALLEL) -m "nightly or hypothesis" --hypothesis-profile anew
	$(EMULATOR)/bin/python -m pytest tests/emulator -m nightly

# As on machines of other people: other umasks, languages, time zones, folders, users. MATRIX='"umask 077" "not root"' chooses rows.
MATRIX ?=

matrix: $(STAMP) $(NATIVE)  ## run the quick tests on fifteen kinds of machines, each in turn; three quarters of an hour; MATRIX='"not root"'
	test -e dist || $(MAKE) --no-print-directory dist
	PYTHONPATH=tests $(BIN)/python -m matrix $(MATRIX)

# What FRESH sets reaches the shells, such as the place of a package index that pip does not know by its own configuration.
FRESH ?=

fresh:  ## clone the last commit, and run `make demo` and `make test` there as on a new machine; some minutes
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && mkdir $$folder/home && git clone --quiet . $$folder/fastrack && \
		for target in demo test; do start=$$(date +%s) && \
			env -i PATH="$$PATH" HOME=$$folder/home LANG=C.UTF-8 $(FRESH) make --no-print-directory -C $$folder/fastrack $$target && \
			echo "make fresh: make $$target took $$(($$(date +%s) - start)) s" || exit; done

# Compiled functions are not counted: coverage sees only Python.
coverage: $(STAMP) $(NATIVE)  ## run all tests, and print the branch coverage of fastrack; some minutes
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest $(PARALLEL)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=cover

# What other versions deprecate is no error here, as it is in the other tests. import-linter, for test_layers, needs a later rich.
LOWEST := .venv-lowest

test-lowest:  ## run the quick tests on the lowest versions that pyproject.toml allows, with Python 3.11; some minutes
	$(MAKE) --no-print-directory VENV=$(LOWEST) $(LOWEST)/.installed
	$(LOWEST)/bin/$(PIP_LOCKED) --requirement tests/lowest.txt
	PYTHONPATH=kernels $(LOWEST)/bin/python -m fastrack_native
	$(LOWEST)/bin/python -m pytest $(PARALLEL) $(QUICK) -W default::DeprecationWarning \
		--ignore tests/kernels --ignore tests/project/test_layers.py

# Those of engines themselves, in folders of tests/crypto, name each engine, and run in `make test`.
ENGINE_TESTS := $(wildcard tests/crypto/test_*.py) tests/sealed tests/transfer/test_channel.py $(addprefix tests/training/test_,checkpoint.py dataset.py model.py)

test-openssl: $(STAMP) $(NATIVE)  ## run the tests that need an engine with OpenSSL in place of the compiled one; some minutes
	FASTRACK_ENGINE=openssl $(BIN)/python -m pytest $(PARALLEL) $(QUICK) $(ENGINE_TESTS)

PYTHONS ?= 3.12 3.13 3.14

test-pythons:  ## run all tests on each Python of PYTHONS="3.12 3.13 3.14", in an environment of its own
	for version in $(PYTHONS); do $(MAKE) --no-print-directory test-all PYTHON=python$$version VENV=.venv-$$version || exit; done

check: $(STAMP)  ## style, types, documentation, tests of texts and the repository
	$(MAKE) --no-print-directory --jobs 2 --output-sync repository lint workflows docs

repository: $(STAMP) $(NATIVE)  ## run the tests of texts and of the repository; a part of check
	$(BIN)/python -m pytest tests/project -m "repository and not nightly"

lint: $(STAMP)  ## check style, formatting, spelling, types, and imports between packages; a part of check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/mypy
	PYTHONPATH=kernels $(BIN)/lint-imports --no-cache

workflows: .venv-workflows/.installed  ## look for what makes the workflows of .github unsafe
	.venv-workflows/bin/zizmor --offline --persona pedantic --quiet .

bench: $(STAMP) $(NATIVE)  ## measure; the machine should be idle
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-sort=name
	$(BIN)/fastrack bench
	-$(BIN)/python -m bench.targets  # which ends with 1 if a target is missed

PEERS := .venv-peers
PEERS_OPTIONS ?=

peers: $(PEERS)/.installed $(NATIVE)  ## benchmark against alternatives; the machine should be idle
	$(PEERS)/bin/python -m bench.peers $(PEERS_OPTIONS)
	$(PEERS)/bin/python -m bench.peers.signing
	$(PEERS)/bin/python -m bench.peers.kserve

bench-compare: $(STAMP) $(NATIVE)  ## is the working tree slower than BASE=<revision>? some minutes; the machine should be idle
	$(BIN)/python -m bench.compare $(BASE)

# Installs and builds nothing, so that a machine without a network will do; says what it skips, and why.
GPU_PYTHON ?= $(shell $(BIN)/python -c 'import cupy' 2>/dev/null && echo $(BIN)/python || echo python3)
GPU_OPTIONS ?=
STAGES ?=
OUT ?= bench/results
SECONDS ?= 540

gpu:  ## check and measure on a GPU: STAGES="first variants profile tests memcheck figures loop" OUT=folder SECONDS=540
	$(GPU_PYTHON) -m bench.gpu $(if $(STAGES),--stages $(STAGES)) --out $(OUT) --seconds $(SECONDS) $(GPU_OPTIONS)

KIT ?= .gpu-kit
KIT_PYTHON ?= 3.12

gpu-kit: $(STAMP) $(ZIGLANG)/.installed  ## gather in KIT=.gpu-kit what `make gpu` needs on a machine without a network; KIT_PYTHON=3.12
	$(WITH_ZIGLANG) $(BIN)/python -m bench.gpu.kit $(KIT) --python $(KIT_PYTHON)

# One environment holds one version of NVRTC, whose package for CUDA 12 has a name of its own; the tests find others in the folders that FASTRACK_NVRTC names.
NVRTC ?= 13.0.88

nvrtc: $(STAMP) $(NATIVE)  ## compile the kernels with another NVRTC as well, and look for spills; NVRTC=13.0.88
	test -d .nvrtc/$(NVRTC) || $(BIN)/python -m pip install --quiet --no-deps --target .nvrtc/$(NVRTC) nvidia-cuda-nvrtc$(if $(filter 12.%,$(NVRTC)),-cu12)==$(NVRTC)
	FASTRACK_NVRTC=.nvrtc/$(NVRTC) $(BIN)/python -m pytest tests/kernels/test_cu_build.py -s

ptx: $(STAMP) $(NATIVE) $(NVRTCS:%=.nvrtc/%/.installed)  ## interpret the PTX of three versions of NVRTC: known answers, races, timing; some minutes
	$(call nvrtcs,$(NVRTCS)) $(BIN)/python -m pytest tests/ptx -s

.nvrtc/%/.installed: tests/ptx/nvrtc.txt | $(STAMP)
	rm -rf .nvrtc/$*
	mkdir -p .nvrtc/$*
	sed -n '/==$* /,/[^\\]$$/p' tests/ptx/nvrtc.txt > .nvrtc/$*/requirements.txt
	$(BIN)/$(PIP_LOCKED) --quiet --target .nvrtc/$* --requirement .nvrtc/$*/requirements.txt
	touch $@

MUTANTS ?=
MUTANTS_OPTIONS ?=

mutants: $(STAMP) $(NATIVE)  ## break the kernels on purpose, and see that the tests notice; some minutes; MUTANTS="parts of names"
	PYTHONPATH=tests $(BIN)/python -m mutants $(MUTANTS_OPTIONS) $(MUTANTS)

# Each of them in an environment of its own: what one lacks, or cannot install, is nothing to the others.
INTEGRATIONS := trainers servers serving clouds tokens flare
ONLY ?= $(INTEGRATIONS)

trainers_EXTRAS := torch,demo
trainers_TESTS := $(addprefix tests/,benchmarks/test_workloads.py $(addprefix training/test_,trainers.py ray.py transformers.py tokenizers.py recipes.py models_of_others.py) \
	training/test_streaming_trainers.py training/test_preempted_trainers.py distributed/test_trainers_checkpoints.py project/test_examples.py \
	sealed/test_quantize.py sealed/test_sample_sources.py serving/test_causal.py serving/test_launched_programs.py)
servers_EXTRAS := torch,broker,remote,vault
servers_TESTS := tests/broker tests/remote tests/providers/test_vault_transit.py tests/benchmarks/test_peers_kserve.py
servers_LACK = $(shell command -v nginx >/dev/null || echo nginx-light)
serving_EXTRAS := torch
serving_TESTS := tests/serving
clouds_EXTRAS := aws,gcp,azure
clouds_TESTS := $(addprefix tests/providers/test_,aws.py gcp.py azure.py wrapped.py)
# The package of Python for TPMs is built here, with the library's headers.
tokens_EXTRAS = pkcs11$(if $(filter libtss2-dev,$(tokens_LACK)),,,tpm)
tokens_TESTS := tests/providers/test_pkcs11.py tests/providers/test_tpm.py
tokens_LACK = $(shell command -v softhsm2-util >/dev/null || echo softhsm2; command -v swtpm >/dev/null || echo swtpm; \
	pkg-config --exists tss2-esys 2>/dev/null || echo libtss2-dev with pkg-config)
flare_TESTS := tests/tour/test_nvflare.py

integrations:  ## test with the real packages: trainers, servers, serving, clouds, tokens, flare; ONLY="trainers clouds" or integrations-trainers
	@failed=; for name in $(ONLY); do $(MAKE) --no-print-directory integrations-$$name || failed="$$failed $$name"; done; \
		test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

integrations-serving: $(LMCACHE)/.installed

$(INTEGRATIONS:%=integrations-%): integrations-%: .venv-%/.installed $(NATIVE)
	.venv-$*/bin/python -m pytest $($*_TESTS)

# With the torch of the other tests, which may be its CPU build here as well. PyPI's torchvision cannot be imported beside
# that, nor can what imports torchvision. What lacks a library of the system is looked at again next time.
$(patsubst %,.venv-%/.installed,$(filter-out flare,$(INTEGRATIONS))): .venv-%/.installed: pyproject.toml bench/pyproject.toml requirements.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --upgrade "pip>=25.1" $(BACKEND)
	grep -o '^torch==[0-9.]*' requirements.txt > .venv-$*/constraints.txt
	$(if $(findstring tpm,$($*_EXTRAS)),.venv-$*/bin/python -m pip install --quiet tpm2-pytss)  # built with what it names
	FASTRACK_WHEEL=pure .venv-$*/bin/python -m pip install --quiet --no-build-isolation --constraint .venv-$*/constraints.txt \
		--editable '.[$($*_EXTRAS)]' --editable ./bench --group $*
	test $* != trainers || .venv-$*/bin/python -c 'import torchvision' 2>.venv-$*/torchvision.txt || { \
		echo "torchvision is of another build than torch, see .venv-$*/torchvision.txt. Its recipes will be skipped"; \
		.venv-$*/bin/python -m pip uninstall --quiet --yes torchvision; }
	test $* != serving || { .venv-$*/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision; \
		.venv-$*/bin/python -m pip install --quiet --no-deps sglang==0.5.23; }  # of other torches both
	@lack="$($*_LACK)"; if test -z "$$lack"; then touch $@; else \
		echo "$*: tests are skipped that take Debian's packages $$lack"; fi

# NVFlare, or what suites of others run with, and behind it in the path what it shares with .venv: torch, fastrack, pytest.
.venv-flare/.installed: tests/tour/nvflare.txt
$(PEERS_TESTS)/.installed: tests/peers/packages.txt
.venv-flare/.installed $(PEERS_TESTS)/.installed: $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(@D)/bin/$(PIP_LOCKED) --quiet --requirement $(filter %.txt,$^)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	touch $@

# Apart, as it pins old versions of what other servers need. Where it cannot be installed its tests are skipped.
SWIFT := .venv-swift

swift:  ## install OpenStack Swift, a server of S3, for the tests of integrations-servers
	test -x $(SWIFT)/bin/python || $(PYTHON) -m venv $(SWIFT)
	$(SWIFT)/bin/python -m pip install --quiet "swift>=2.35"

# Their tests come from source archives, which pip loads by their hashes and does not build: only metadata is asked of them.
SUITES ?=

peers-tests: $(PEERS_TESTS)/.installed .peers-tests/sdists/.loaded $(NATIVE)  ## run test suites of others with fastrack in place; five minutes; goes on where it stopped; SUITES="safetensors accelerate"
	PYTHONPATH=tests $(PEERS_TESTS)/bin/python -m peers $(SUITES)

.peers-tests/sdists/.loaded: tests/peers/sdists.txt | $(STAMP)
	rm -rf $(@D)
	PYTHONPATH=$(CURDIR)/tests/peers/backend $(BIN)/python -m pip download --quiet --no-deps --require-hashes --no-binary :all: \
		--no-build-isolation --dest $(@D) --requirement $<
	touch $@

emulator: $(EMULATOR)/.installed $(NATIVE)  ## test the device's code with the real CuPy on an emulated GPU
	$(EMULATOR)/bin/python -m pytest --numprocesses 2 --dist worksteal tests/emulator -m "not nightly"

# Needs Debian's qemu-user, gcc-aarch64-linux-gnu and libc6-dev-arm64-cross.
AARCH64_TESTS := aarch64 $(patsubst %,crypto/engines/test_engine_%.py,vectors chunks pieces pass interop buffers derivation)

aarch64: $(STAMP) $(NATIVE)  ## test the engine for AArch64 on an emulated CPU, with QEMU and a cross compiler; some minutes
	@for tool in qemu-aarch64 aarch64-linux-gnu-gcc; do command -v $$tool >/dev/null || { \
		echo "expected $$tool. Install qemu-user, gcc-aarch64-linux-gnu and libc6-dev-arm64-cross"; exit 1; }; done
	FASTRACK_AARCH64=1 $(BIN)/python -m pytest $(PARALLEL) $(addprefix tests/,$(AARCH64_TESTS)) -k "not thread and not long"

# Needs Debian's qemu-user and mmdebstrap.
AARCH64_ROOT := .venv-aarch64

aarch64-wheel: $(STAMP) $(NATIVE) $(if $(WHEEL),,$(ZIGLANG)/.installed)  ## install the wheel for AArch64 in an emulated Debian, and try it there; some minutes; WHEEL=file
	PYTHONPATH=tests:$(CURDIR)/$(ZIGLANG) $(BIN)/python tests/aarch64/wheel.py $(AARCH64_ROOT) $(WHEEL)

FUZZ_SECONDS ?= 600
FUZZ_SCHEDULES ?= 10000
FUZZ_KILLS ?= 500
FUZZ_INTERRUPTIONS ?= 20000
SOAK_SECONDS ?= 600
FUZZ_STAMP := $(VENV)/.fuzz

fuzz: $(FUZZ_STAMP) $(NATIVE)  ## fuzz the parsers; FUZZ_SECONDS=600 FUZZ_SCHEDULES=10000 FUZZ_KILLS=500
	FASTRACK_SCHEDULES=$(FUZZ_SCHEDULES) $(BIN)/python -m pytest -q --timeout 0 tests/transfer/test_owners.py -k raised_to_its_owner
	FASTRACK_SCHEDULES=$(FUZZ_SCHEDULES) $(BIN)/python -m pytest -q --timeout 0 tests/sealed/test_rollback_schedules.py
	FASTRACK_KILLS=$(FUZZ_KILLS) $(BIN)/python -m pytest -q --timeout 0 tests/distributed/test_processes.py -k killed
	FASTRACK_INTERRUPTIONS=$(FUZZ_INTERRUPTIONS) $(BIN)/python -m pytest -q --timeout 0 tests/sealed/test_import_life.py
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) --folder .fuzz --json .fuzz/fuzz.json

soak: $(STAMP) $(NATIVE)  ## run transfers on many threads and inject faults; SOAK_SECONDS=600
	PYTHONPATH=tests $(BIN)/python -m soak --seconds $(SOAK_SECONDS) --json .fuzz/soak.json

# A second reader, which shares nothing with fastrack. Its packages are installed once for each lock. Without Node it fails, and skips nothing.
NODE_LEAST := 20.19

javascript: $(NODE_STAMP)  ## read the cases of the test kit in JavaScript; needs Node 20.19 or later
	node tests/javascript/kit.mjs tests/testkit/cases

$(NODE_STAMP): tests/javascript/package.json tests/javascript/package-lock.json tests/javascript/.npmrc
	@found=$$(node --version) || { echo "make javascript: expected Node $(NODE_LEAST) or later, got none" >&2; exit 1; }; \
		printf '%s\n' v$(NODE_LEAST) "$$found" | sort -CV || { echo "make javascript: expected Node $(NODE_LEAST) or later, got $$found" >&2; exit 1; }
	npm ci --prefix tests/javascript --ignore-scripts --loglevel=error
	touch $@

docs: $(STAMP) $(NATIVE)  ## build the documentation; warnings are errors
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

# Of a version that was tried, and for torch of its builds with and without CUDA: what an unknown version is compared with.
writers: $(STAMP) $(NATIVE)  ## add what the installed torch, safetensors and trainers write with to fastrack/_protect/writers.txt; read its diff
	PYTHONPATH=tests $(BIN)/python -m helpers.writers

SITE := https://fastrack-io.github.io/fastrack/

site: $(STAMP) $(NATIVE)  ## build the documentation as it is published, in docs/_build/site
	rm -rf docs/_build/site
	$(BIN)/sphinx-build -q -W --keep-going -b html -D html_baseurl=$(SITE) docs docs/_build/site
	$(BIN)/python .ci/site.py docs/_build/site $(SITE)

# Needs Chromium, such as Debian's package of that name.
site-check: docs  ## look for what is too wide or cut, links and addresses that lead nowhere, at 1280 and 390 pixels, and try search and the page of a sealed file; needs Chromium
	PYTHONPATH=tests $(BIN)/python -m browser docs/_build/html $(PICTURES)
	PYTHONPATH=tests $(BIN)/python -m browser.sealed_file docs/_build/html $(PICTURES)

# The versions that fastrack is developed and tested with, which stay as they are where they still fit: remove the files to
# have all new ones. PyPI has no CPU build of torch for Linux, so the hash of the one that CI finds is added.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" --config-file .ci/lock.toml
TORCH_CPU := 6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b  # torch-2.13.0+cpu-cp311-manylinux_2_28_x86_64

lock: $(STAMP)  ## write the versions and hashes of all packages, after a change of pyproject.toml; asks the package index
	$(LOCK) pyproject.toml --extra torch --extra demo --group dev --group linker --output-file requirements.txt
	grep -q $(firstword $(TORCH_CPU)) requirements.txt || sed -i 's/^torch==2.13.0 .*/&\n    --hash=sha256:$(firstword $(TORCH_CPU)) \\/' requirements.txt
	$(LOCK) --no-generate-hashes --constraint requirements.txt pyproject.toml --extra torch --extra demo --group editable --output-file .ci/demo.txt
	$(LOCK) pyproject.toml --extra demo --group native --resolution lowest-direct --output-file tests/lowest.txt
	$(LOCK) pyproject.toml --group emulator --output-file tests/emulator/requirements.txt
	$(LOCK) --group fuzz --output-file tests/fuzz/requirements.txt
	$(LOCK) --group workflows --output-file .ci/workflows.txt
	$(LOCK) --group upload --constraint requirements.txt --output-file .ci/upload.txt
	$(LOCK) --no-deps tests/serving/lmcache.in --output-file tests/serving/lmcache.txt
	$(LOCK) --no-deps tests/tour/nvflare.in --output-file tests/tour/nvflare.txt
	$(LOCK) --no-deps tests/peers/packages.in --output-file tests/peers/packages.txt
	$(LOCK) --no-deps tests/peers/sdists.in --output-file tests/peers/sdists.txt

# Each is built twice, in folders with different names and rights: of the commit, and of only the source archive. The wheel
# for this machine is then installed beside nothing but what it needs, which is listed with versions and licences.
WHEELS := x86_64 aarch64 pure
PACKAGES := $(WHEELS) bench
TREES ?= archive commit

dist: $(STAMP) $(ZIGLANG)/.installed  ## build the wheels of the last commit twice, compare and try them, list what they need, and give the hashes
	rm -rf dist .dist
	mkdir -p .dist/commit .dist/archive
	git log -1 --format='%H %ct' > .dist/head
	(umask 022; read commit time < .dist/head; git archive $$commit | tar -x -C .dist/commit)
	$(MAKE) --no-print-directory .dist/commit.sdist
	(umask 077; tar -xz -C .dist/archive --strip-components 1 -f .dist/commit.sdist/*.tar.gz)
	$(MAKE) --no-print-directory --jobs 2 .dist/archive.sdist $(foreach tree,$(TREES),$(PACKAGES:%=.dist/$(tree).%))
	for kind in sdist $(if $(filter commit,$(TREES)),$(PACKAGES)); do diff -r .dist/commit.$$kind .dist/archive.$$kind || exit; done
	mkdir dist
	mv .dist/archive.*/* dist
	$(BIN)/python .ci/wheels.py dist
	$(BIN)/uv venv --quiet --python $(BIN)/python .dist/env
	$(BIN)/uv pip install --quiet --python .dist/env --constraint requirements.txt dist/*_$(lastword $(PLATFORM)).whl
	.dist/env/bin/python -I -c 'from fastrack._crypto import native; exit(native.problem())'
	set -e; version=$$(.dist/env/bin/fastrack --version | cut -d ' ' -f 2); \
		sed "s/^dynamic = .*/version = \"$$version\"/" pyproject.toml > .dist/pyproject.toml; \
		$(BIN)/cyclonedx-py environment --pyproject .dist/pyproject.toml --mc-type library --output-reproducible \
		--output-file .dist/bill.json .dist/env/bin/python; \
		$(BIN)/python .ci/bill.py .dist/bill.json dist > dist/fastrack_io-$$version.cdx.json
	$(BIN)/uv pip install --quiet --python .dist/env --no-deps dist/fastrack_bench-*.whl
	.dist/env/bin/fastrack plan transfer --published all --size 1MiB >/dev/null
	rm -rf .dist
	cd dist && sha256sum fastrack_* | tee SHA256SUMS

# The kernels are those of `make native`: to compile them for each wheel anew takes a minute of processor time.
wheels: $(STAMP) $(NATIVE)  ## the same as dist, but build each wheel once only, with the kernels of the checkout, as nothing is compared
	FASTRACK_KERNELS=$(CURDIR)/fastrack/kernels $(MAKE) --no-print-directory dist TREES=archive

release-files: $(STAMP) .venv-upload/.installed  ## look at what `make dist` left: names, hashes, metadata, bill of materials, description
	.venv-upload/bin/twine check --strict dist/*.whl dist/*.tar.gz
	$(BIN)/python .ci/release.py files fastrack-io dist

# Not by what `make dist` builds with, but as pip builds for users: in an empty environment, from the source archive, with what
# pyproject.toml requires: the locked versions, by their hashes, which pip takes from constraints as well.
release-check: $(STAMP) .venv-upload/.installed  ## all that a release is checked with, on its commit: `make dist`, built again in empty environments; some minutes
	test -z "$$(git status --porcelain)" || { echo "expected no changes, as the last commit is what is built. Commit them"; exit 1; }
	$(MAKE) --no-print-directory fresh
	$(MAKE) --no-print-directory dist release-files
	rm -rf .dist
	mkdir -p .dist/source .dist/sdist
	git archive HEAD | tar -x -C .dist/source
	for kind in sdist $(PACKAGES); do $(MAKE) --no-print-directory .dist/isolated.$$kind || exit; done
	for path in .dist/isolated.*/*; do cmp $$path dist/$$(basename $$path) || exit; done
	$(BIN)/python .ci/release.py changelog fastrack-io > .dist/notes.md
	for tag in $$(git tag --points-at HEAD 'v*'); do $(BIN)/python .ci/release.py tag fastrack-io $$tag refs/remotes/origin/main --days 36500 || exit; done
	rm -rf .dist

# Of fastrack-bench both files, of the source archive the wheel.
kind_of = $(if $(filter sdist,$(1)),--sdist,$(if $(filter bench,$(1)),,--wheel))

.dist/isolated.sdist: TREE := .dist/source
.dist/isolated.bench: TREE := .dist/sdist/bench
.dist/isolated.%: TREE = .dist/sdist
.dist/isolated.%:
	test $* = sdist || test -e .dist/sdist/PKG-INFO || tar -xz -C .dist/sdist --strip-components 1 -f .dist/isolated.sdist/*.tar.gz
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) FASTRACK_WHEEL=$* PIP_CONSTRAINT=$(CURDIR)/requirements.txt \
		.venv-upload/bin/python -m build $(call kind_of,$*) --outdir $@ $(TREE) >$@.log 2>&1 || { cat $@.log; exit 1; }

TESTKIT := tests/testkit

testkit-dist: $(STAMP) .venv-upload/.installed  ## build the wheel and the source archive of the test kit from the last commit twice, and check them
	rm -rf dist-testkit .dist-testkit
	mkdir -p .dist-testkit/commit .dist-testkit/again
	git archive HEAD $(TESTKIT) | tar -x -C .dist-testkit
	for try in commit again; do SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) .venv-upload/bin/python -m build --no-isolation \
		--outdir .dist-testkit/$$try .dist-testkit/$(TESTKIT) >.dist-testkit/log 2>&1 || { cat .dist-testkit/log; exit 1; }; done
	diff -r .dist-testkit/commit .dist-testkit/again
	mv .dist-testkit/commit dist-testkit
	rm -rf .dist-testkit
	cd dist-testkit && sha256sum fastrack_testkit-* | tee SHA256SUMS
	.venv-upload/bin/twine check --strict dist-testkit/*.whl dist-testkit/*.tar.gz
	$(BIN)/python .ci/release.py files fastrack-testkit dist-testkit

# One result of one tree, as .dist/commit.aarch64.
.dist/%:
	@umask $(if $(filter commit.%,$*),022,077); read commit time < .dist/head; \
		SOURCE_DATE_EPOCH=$$time FASTRACK_WHEEL=$(subst .,,$(suffix $*)) $(WITH_ZIGLANG) $(BIN)/python -m build --no-isolation \
		$(call kind_of,$(subst .,,$(suffix $*))) --outdir $@ .dist/$(basename $*)$(if $(filter %.bench,$*),/bench) >$@.log 2>&1 || { cat $@.log; exit 1; }

# Those of vLLM and LMCache take gigabytes; `$(BIN)/python -m environments --help` says what there is.
ENVIRONMENTS ?= numba-0.65.0
ENVIRONMENTS_OPTIONS ?=

environments: $(STAMP)  ## install the wheel of dist/ beside other packages by pip's resolver, and use it; ENVIRONMENTS="numba python-3.12"
	test -e $(or $(WHEEL),dist) || $(MAKE) --no-print-directory dist
	PYTHONPATH=tests $(BIN)/python -m environments $(ENVIRONMENTS_OPTIONS) $(or $(WHEEL),dist) $(ENVIRONMENTS)

clean:  ## remove what was built, .venv included
	rm -rf .venv .venv-* .ziglang .dist .dist-testkit .fuzz .gpu-kit .lmcache .matrix .nvrtc .peers-tests build dist dist-testkit docs/_build .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		.coverage* .import_linter_cache $(NATIVE) fastrack/kernels tests/javascript/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What the demo runs, and so a user: `make test` adds the rest, in the same environment. The machine code follows, as a target of
# its own, so that one sees what takes ten seconds.
#
# Whatever is installed has a hash in requirements.txt, torch too: as PyPI has it, or its CPU build where pip is set to find
# one, which it would pass over if it knew the hash of another. CUDA's libraries have none: torch of PyPI names their versions,
# and `pip check` whether they are there.
$(DEMO_STAMP): PIP_DEMO := $(BIN)/$(PIP_LOCKED)
$(DEMO_STAMP): pyproject.toml hatch_build.py requirements.txt .ci/demo.txt
	@printf '%s\n' "Installing what the demo runs, in $(VENV): $$(grep -c == .ci/demo.txt) packages, 0.3 GB to download," \
		"1.1 GB on disk, most of it torch. On a line of 100 Mbit/s that takes a minute." \
		"Where pip finds torch's build for GPUs, its libraries are some gigabytes more." \
		$(if $(LINKER),"ziglang takes the place of a C compiler: 0.1 GB more to download and 0.4 GB on disk.") ""
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(VENV)/torch
	@sed -n '/^pip==/,/[^\\]$$/p' requirements.txt > $(VENV)/pip.txt
	@sed -n '/^torch==/,/[^\\]$$/p' requirements.txt > $(VENV)/torch.txt
	@awk 'NR == FNR { named[$$1] = 1; next } /^[^ ]/ { wanted = $$1 in named && !/^torch==/ } wanted' .ci/demo.txt requirements.txt > $(VENV)/demo.txt
	@$(PIP_DEMO) --requirement $(VENV)/pip.txt
	@$(BIN)/python -m pip download --no-deps --dest $(VENV)/torch $$(grep -o '^torch==[0-9.]*' requirements.txt)
	@$(PIP_DEMO) --no-index --find-links $(VENV)/torch --requirement $(VENV)/torch.txt
	@rm -r $(VENV)/torch
	@$(PIP_DEMO) --requirement $(VENV)/demo.txt
	@FASTRACK_WHEEL=pure $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m pip check >$(VENV)/check.txt || $(BIN)/python -m pip install --no-build-isolation --editable ".[torch,demo]" --group native
	@touch $@

# What is developed and tested with, ziglang left out.
$(STAMP): $(DEMO_STAMP) bench/pyproject.toml
	@echo "Installing what is developed and tested with, in $(VENV): 0.4 GB to download, 1.3 GB on disk"
	@sed '/^ziglang==/,/[^\\]$$/d' requirements.txt > $(VENV)/requirements.txt
	$(BIN)/$(PIP_LOCKED) --requirement $(VENV)/requirements.txt
	@FASTRACK_WHEEL=pure $(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[torch,demo]" --editable ./bench --group dev
	@touch $@

# Apart, as it is large: .venv of a machine with a C compiler does without.
$(ZIGLANG)/.installed: requirements.txt
	rm -rf $(ZIGLANG)
	mkdir $(ZIGLANG)
	sed -n '/^ziglang==/,/[^\\]$$/p' requirements.txt > $(ZIGLANG)/requirements.txt
	$(PIP_LOCKED:python%=$(PYTHON)%) --target $(ZIGLANG) --requirement $(ZIGLANG)/requirements.txt
	touch $@

# Apart, because packages that nothing else needs come with them, and versions that the others would not choose.
$(PEERS)/.installed: pyproject.toml bench/pyproject.toml bench/peers/constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade "pip>=25.1" $(BACKEND)
	FASTRACK_WHEEL=pure $(PEERS)/bin/python -m pip install --quiet --no-build-isolation --constraint bench/peers/constraints.txt --editable ".[bench]" --editable ./bench
	touch $@

# Apart, as nothing that is tested or built needs them.
.venv-workflows/.installed .venv-upload/.installed: .venv-%/.installed: .ci/%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/$(PIP_LOCKED) --quiet --requirement $<
	touch $@

# Apart, because without CuPy the ordinary tests show what users without it see.
$(EMULATOR)/.installed: pyproject.toml tests/emulator/requirements.txt
	test -x $(EMULATOR)/bin/python || $(PYTHON) -m venv $(EMULATOR)
	$(EMULATOR)/bin/$(PIP_LOCKED) --requirement tests/emulator/requirements.txt
	FASTRACK_WHEEL=pure $(EMULATOR)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Apart, as atheris has wheels for some Pythons only. Where it has none `make fuzz` says so, and what to run instead.
$(FUZZ_STAMP): $(STAMP) tests/fuzz/requirements.txt
	-$(BIN)/$(PIP_LOCKED) --requirement tests/fuzz/requirements.txt && touch $@
