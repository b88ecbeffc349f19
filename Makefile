# Everything happens in .venv; a fresh machine needs Python 3.11 to 3.13, make and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := cluster workers dispatch graphs tests benchmarks examples ray_configs
# The release that CPU results were made with; give another one, a CPU build say, as TORCH='torch==VERSION'.
TORCH ?= torch==2.13.0
export OMP_NUM_THREADS ?= 1
KILL_ROWS := build/kill-matrix.jsonl
SOAK_SECONDS ?= 600
# A folder of its own: in .venv itself Triton would change what `import torch` imports, for every other test.
KERNELS := $(VENV)/kernels
PRINT_KERNELS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["kernels"])

.PHONY: install run test test-kernels test-matrix test-bad-input test-faults test-environment test-kill-matrix test-long test-scale test-autoscaler lint format types bench clean soak

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@

run: install  ## the main job: complete examples/prompts.jsonl on two CPU ranks
	$(BIN)/expert-pool generate --model examples/tiny_moe --prompts examples/prompts.jsonl --output out.jsonl --ranks 2 \
		--address local

test: install  ## the whole suite but for what the targets below hold
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-kernels: $(KERNELS)/.installed  ## Triton kernels in its interpreter, against plain PyTorch; `test` skips them
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/$(KERNELS) $(BIN)/python -m pytest tests/workers/kernels/test_routers.py \
		tests/dispatch/test_routing_kernels.py tests/dispatch/test_triton_gemm.py tests/dispatch/test_triton_experts.py \
		tests/dispatch/test_humming_kernels.py

$(KERNELS)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(KERNELS) $$($(BIN)/python -c '$(PRINT_KERNELS)')
	touch $@

test-bad-input: install  ## every key of a model folder and a pool with every wrong value; the suite holds a seeded sample
	EXPERT_POOL_FULL_MATRIX=1 $(BIN)/python -m pytest -n 2 tests/cluster/planning/test_bad_input_everywhere.py

test-matrix: install  ## every family, checkpoint format, layout and dispatch against Transformers; the suite holds a seeded sample
	EXPERT_POOL_FULL_MATRIX=1 $(BIN)/python -m pytest tests/workers/test_token_equality.py tests/workers/test_mixed_steps.py \
		tests/workers/model/test_published_formats.py tests/workers/model/test_kept_weights.py tests/graphs/test_replay.py \
		tests/graphs/test_draft_replay.py tests/workers/compiled/test_compiled_regions.py

test-faults: install  ## every fault at capture and in a step, on 2 and 4 ranks; the suite holds a seeded sample
	EXPERT_POOL_FULL_MATRIX=1 $(BIN)/python -m pytest -m "not autoscaler" tests/graphs/test_capture_faults.py

test-environment: install  ## every variable that PyTorch reads for communication, on one of two ranks alone; the suite holds a sample
	EXPERT_POOL_FULL_MATRIX=1 $(BIN)/python -m pytest tests/workers/start/test_environment_differences.py

test-kill-matrix: install  ## eleven faults, five times each at random steps, into docs/kill-matrix.md; half an hour on 2 cores
	rm -f $(KILL_ROWS)
	EXPERT_POOL_FULL_MATRIX=1 EXPERT_POOL_KILL_ROWS=$(KILL_ROWS) $(BIN)/python -m pytest tests/cluster/ranks/test_kill_matrix.py \
		tests/cluster/driver/test_killed_drivers.py tests/cluster/ranks/test_lost_nodes.py; \
		status=$$?; $(BIN)/python tests/support/kill_report.py $(KILL_ROWS) docs/kill-matrix.md; exit $$status

soak: install  ## random arrivals and a kill every minute, for SOAK_SECONDS, into docs/soak.md
	$(BIN)/python tests/support/soak.py --seconds $(SOAK_SECONDS) --report docs/soak.md

test-long: install  ## cases like those of the suite, on more ranks or at another place
	$(BIN)/python -m pytest -m long

test-scale: install  ## 8 and 16 ranks on this machine against Transformers; the agreement over 2 to 16 beside an all-gather
	$(BIN)/python -m pytest -m long tests/workers/test_scale.py
	$(BIN)/python benchmarks/agreement.py

test-autoscaler: install  ## Ray's real autoscaler over its fake node provider; ends only processes that it started
	$(BIN)/python -m pytest -m autoscaler tests/cluster/ray_session/test_autoscaler.py

lint: install
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: install
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# The import name maps to the top-level folders; mypy finds them through a folder of links.
types: install
	mkdir -p .mypy_house/expert_pool
	for folder in cluster workers dispatch graphs; do ln -sfn ../../$$folder .mypy_house/expert_pool/$$folder; done
	MYPYPATH=.mypy_house $(BIN)/mypy --namespace-packages --explicit-package-bases \
		-p expert_pool.cluster -p expert_pool.workers -p expert_pool.dispatch -p expert_pool.graphs

bench: install
	$(BIN)/python benchmarks/cpu_generate.py

clean:
	rm -rf $(VENV) .mypy_house build *.egg-info
