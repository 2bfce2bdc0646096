# `make demo` and `make test` are all that a newcomer needs; both install first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGE := $(VENV)/.package
# What is imported is compiled when it is: compiling all of torch takes longer than the demo.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
DEMO := demo

# Compiled modules are kept, also where the environment forbids it, as images for containers often do: a process that
# imports torch and MONAI then starts in half the time, and tests start many.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-core test-elsewhere test-all coverage lint types catalogue docs docs-fast notebooks wheel dist release clean

install: $(STAMP)

# torch comes first: asked for by another package, it would come as the build with gigabytes of CUDA
# libraries, also on a machine without a GPU. `--no-deps`, since the index of CPU builds is no mirror of PyPI.
define TORCH
	@command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON) is not installed." \
	  "Install Python 3.10 or newer (Debian, Ubuntu: apt install python3 python3-venv)."; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than 3.10." \
	  "Name a newer one: make PYTHON=python3.12"; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv and no pip." \
	  "Debian and Ubuntu have them in a package of their own: apt install python3-venv"; exit 2; }
	"$(PYTHON)" -m venv $(VENV)
	@if nvidia-smi -L >/dev/null 2>&1; then echo "installing torch with CUDA"; \
	  $(PIP) "torch>=2.4.1"; \
	else echo "installing the CPU build of torch"; \
	  $(PIP) --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0; \
	fi
endef

$(STAMP): pyproject.toml
	$(TORCH)
	$(PIP) -e '.[dev]'
	@touch $@

# What the demo needs, and no tools of developers.
$(PACKAGE): pyproject.toml
	$(TORCH)
	$(PIP) -e .
	@touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(PACKAGE))
	rm -rf $(DEMO)
	$(BIN)/medfedaug demo --out $(DEMO)

# A process per core and two more, since tests wait for the processes that they start; each file is one process's,
# since what is slow to start is shared within a file. Their files lie in memory where there is room for them: ledgers
# are written through to a disk at every step, and waited for.
TEST_PROCESSES := $(shell expr $$(nproc 2>/dev/null || echo 2) + 2)
define RUN_TESTS
	folder=$$(mktemp -d "$$(sh tests/support/folder_in_memory.sh)/medfedaug-XXXXXX") && \
	  trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT TERM && \
	  TMPDIR="$$folder" $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile \
	  --no-loadscope-reorder
endef

test: install
	$(RUN_TESTS) --durations 15

# The tests of the core, in a copy without what hospitals and studies add.
ABOVE_CORE := cli hospital integration nvflare_jobs research
test-core: install
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  git ls-files -z | xargs -0 cp --parents -P -t "$$folder" && cd "$$folder" && \
	  rm -r medfedaug/hospital medfedaug/research $(ABOVE_CORE:%=tests/%) && \
	  PYTHONPATH="$$folder/src" $(CURDIR)/$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile

# The tests as an ordinary user with another Python, locale, time zone, umask and processor runs them.
test-elsewhere:
	.ci/elsewhere test

# The slow tests too: those of whole deployments, of clusters and of every combination.
test-all: install
	$(RUN_TESTS) -m "slow or not slow" --durations 15

# Lines and branches that the fast tests run, those in processes that they start too: `make test` stays without it.
coverage: install
	rm -rf build/coverage && mkdir -p build/coverage
	$(RUN_TESTS) --cov --cov-report term:skip-covered --cov-report html --cov-report xml

lint: install types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/prose.py
	$(BIN)/python docs/check_pages.py
	$(BIN)/python docs/generate.py --check

types: install
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# All that is made from the code: the list of methods, the ready jobs, the tables of methods on the pages, the picture
# of the packages.
catalogue: install
	$(BIN)/python docs/generate.py

# The pages, the tutorials among them, which run as they are built. A warning is an error, and so is a link within the
# pages that leads nowhere, or a public name without a description.
$(VENV)/.docs: $(STAMP)
	$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	rm -rf build/html docs/tutorials docs/gallery
	$(BIN)/sphinx-build -q -W --keep-going -d build/doctrees docs build/html
	$(BIN)/python docs/check_pages.py build/html

# The same without running tutorials and gallery: minutes less, while a page is written.
docs-fast: $(VENV)/.docs
	rm -rf docs/tutorials docs/gallery
	$(BIN)/sphinx-build -q -W --keep-going -D plot_gallery=0 -d build/doctrees-fast docs build/html-fast
	$(BIN)/python docs/check_pages.py build/html-fast

# The tutorials as notebooks, beside `shell.py` that they share: build/notebooks can be copied anywhere.
notebooks: $(VENV)/.docs
	rm -rf build/notebooks && mkdir -p build/notebooks
	cp examples/tutorials/*.py build/notebooks
	cd build/notebooks && ../../$(BIN)/sphinx_gallery_py2jupyter [0-9]*.py && rm [0-9]*.py

# The wheel as a user gets it, in an environment that has its dependencies and nothing of this folder.
WHEEL := build/wheel
wheel: install
	rm -rf $(WHEEL) build/lib build/bdist*
	$(BIN)/python -m pip wheel --quiet --no-deps -w $(WHEEL) .
	$(BIN)/python -m venv --without-pip $(WHEEL)/env
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$($(WHEEL)/env/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/dependencies.pth"
	$(BIN)/python -m pip --python $(WHEEL)/env/bin/python install --quiet --no-deps $(WHEEL)/*.whl
	MEDFEDAUG_WHEEL=$(WHEEL) $(BIN)/python -m pytest -q -m slow tests/integration/test_package.py
	cd $(WHEEL) && env/bin/python -c "import medfedaug, sys; assert medfedaug.__file__.startswith(sys.prefix)"
	cd $(WHEEL) && OMP_NUM_THREADS=1 env/bin/python -m pytest -q -c ../../pyproject.toml ../../tests/cli/test_app.py

# Wheel, source, list of components (CycloneDX) and notes of the version, to attach to a release.
dist: install
	rm -rf dist build/release build/lib build/bdist*
	$(BIN)/python -m pip install --quiet -e '.[release]'
	$(BIN)/python -m build --quiet --outdir dist .
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
	build/release/bin/pip install --quiet dist/*.whl
	$(BIN)/cyclonedx-py environment --output-reproducible --output-format JSON -o dist/sbom.cdx.json build/release/bin/python
	$(BIN)/python deploy/release.py notes dist/notes.md
	cd dist && sha256sum *.whl *.tar.gz *.json > SHA256SUMS

# VERSION=0.4.0: writes the version, also above the changes, commits and tags. Nothing is pushed (docs/releasing.md).
release: install
	test -n "$(VERSION)" || { echo "VERSION=1.2.3 is missing"; exit 2; }
	test -z "$$(git status --porcelain)" || { echo "commit first"; exit 2; }
	$(BIN)/python deploy/release.py version $(VERSION)
	$(BIN)/python docs/generate.py
	git add -A CHANGELOG.md CITATION.cff SECURITY.md medfedaug/_version.py nvflare_jobs/jobs
	git commit -m "release: $(VERSION)"
	git tag -a v$(VERSION) -m "medfedaug $(VERSION)"

clean:
	rm -rf $(VENV) $(DEMO) docs/tutorials docs/gallery build dist src/*.egg-info
