# Everything here installs what it needs first; see scripts/setup.sh. ARGS are passed on.
#   make tune ARGS="--trials 50"      make test ARGS="-k timing"

.PHONY: tune test newest-mesa check lock

tune:
	@scripts/setup.sh run
	.venv/bin/tuner tune $(ARGS)

test:
	@scripts/setup.sh dev
	.venv/bin/python -m pytest --require-vulkan $(ARGS)

check:
	@scripts/setup.sh dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

lock:
	scripts/lock.sh

newest-mesa:
	scripts/newest-mesa.sh $(ARGS)
